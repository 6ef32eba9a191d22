"""Data-parallel training (extra "torch"): one model, the examples of each step divided among ranks.

`data_parallel.py` computes a step's gradient, with DistributedDataParallel. `training.py` trains on the server's own
data, also on the predictions of clients' models (FedDF), `trainer.py` evaluates. The result depends on
the job's number of ranks, the logical ones; if there are fewer processes, each computes the parts of several logical
ranks in turn.
"""

from __future__ import annotations

from fedplat.pytorch.packed import pack_sequences
from fedplat.pytorch.server.data_parallel import DataParallelGradients
from fedplat.pytorch.server.trainer import ServerTrainer, evaluate, make_on_all_ranks
from fedplat.pytorch.server.training import TrainingCurve, TrainingRun, distill, train

__all__ = [
    "DataParallelGradients",
    "ServerTrainer",
    "TrainingCurve",
    "TrainingRun",
    "distill",
    "evaluate",
    "make_on_all_ranks",
    "pack_sequences",
    "train",
]
