"""Data-parallel training (extra "torch"): one model, the examples of each step spread over ranks.

`spread.py` computes a step's gradient, with DistributedDataParallel. `training.py` trains on the server's own data,
`distillation.py` on what clients' models say of it (FedDF), `scoring.py` evaluates. The math is that of the job's
number of ranks, the logical ones; the processes that there are do their parts, in turn where they are fewer.
"""

from __future__ import annotations

from fedplat.pytorch.server.data_parallel import DataParallelGradients
from fedplat.pytorch.server.distillation import distill
from fedplat.pytorch.server.evaluation import evaluate
from fedplat.pytorch.server.packing import pack_sequences
from fedplat.pytorch.server.trainer import ServerTrainer, make_on_all_ranks
from fedplat.pytorch.server.training import TrainingCurve, TrainingRun, train

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
