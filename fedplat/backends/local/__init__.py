"""Local training (extra "torch"): what clients in the field and simulated ones do between two model versions.

`train.py` is the loop. `options.py` says what a job's `[config]` means, `batches.py` which examples make a step, and
`fedplat/aggregate/local.py` what an algorithm is.
"""

from __future__ import annotations

from fedplat.backends.local.batches import Indices, Plan, in_order
from fedplat.backends.local.examples import DatasetExamples, Examples, TensorExamples, examples_of, examples_to_use
from fedplat.backends.local.learner import BATCH_NORM, Learner, Loss, Trainee, seeded
from fedplat.backends.local.options import LocalOptions
from fedplat.backends.local.passes import Alone, Passes
from fedplat.backends.local.scores import Scores, Sums
from fedplat.backends.local.sgd import Sgd
from fedplat.backends.local.stepper import MakeOptimizer
from fedplat.backends.local.train import evaluate, scored, train
from fedplat.backends.local.work import Training

__all__ = [
    "BATCH_NORM",
    "Alone",
    "DatasetExamples",
    "Examples",
    "Indices",
    "Learner",
    "LocalOptions",
    "Loss",
    "MakeOptimizer",
    "Passes",
    "Plan",
    "Scores",
    "Sgd",
    "Sums",
    "TensorExamples",
    "Trainee",
    "Training",
    "evaluate",
    "examples_of",
    "examples_to_use",
    "in_order",
    "scored",
    "seeded",
    "train",
]
