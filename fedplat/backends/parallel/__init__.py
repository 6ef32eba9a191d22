"""Data-parallel training (extra "torch"): one model, the examples of each step spread over ranks.

`spread.py` computes a step's gradient, with DistributedDataParallel. `training.py` trains on the server's own data,
`distillation.py` on what clients' models say of it (FedDF), `scoring.py` evaluates. The math is that of the job's
number of ranks, the logical ones; the processes that there are do their parts, in turn where they are fewer.
"""

from __future__ import annotations

from fedplat.backends.parallel.distillation import distill
from fedplat.backends.parallel.packing import packed
from fedplat.backends.parallel.scoring import evaluate
from fedplat.backends.parallel.spread import Spread
from fedplat.backends.parallel.trainer import ServerTrainer, agreed
from fedplat.backends.parallel.training import ServerTraining, Trained, train

__all__ = ["ServerTrainer", "ServerTraining", "Spread", "Trained", "agreed", "distill", "evaluate", "packed", "train"]
