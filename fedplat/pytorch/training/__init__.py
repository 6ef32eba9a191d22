"""Local training (extra "torch"): the training between two model versions, on real and simulated clients.

`trainer.py` contains the loop, `examples.py` the examples of each step, `fedplat/local_options.py` the meaning of a
job's `[config]`, and `fedplat/aggregate/local.py` the algorithms.
"""

from __future__ import annotations

from fedplat.local_options import LocalOptions
from fedplat.pytorch.training.algorithm import build_guarded_algorithm
from fedplat.pytorch.training.examples import (
    DatasetExamples,
    Examples,
    Indices,
    PrefetchDataset,
    StepSchedule,
    TensorExamples,
    as_dataset,
    check_examples,
    iterate_batches,
    make_examples,
)
from fedplat.pytorch.training.frozen_base import FrozenBase, check_base, explain_missing_base
from fedplat.pytorch.training.gradients import GradientComputation, LocalTraining, SingleProcessGradients
from fedplat.pytorch.training.idle_modules import IdleModules
from fedplat.pytorch.training.learner import (
    BATCH_NORM,
    Learner,
    Share,
    Trainee,
    choose_device,
    forward_features,
    read_targets,
    use_seed,
)
from fedplat.pytorch.training.meaning import Accuracy, Correct, Loss, Scores, Sums
from fedplat.pytorch.training.stepper import MakeOptimizer, Sgd
from fedplat.pytorch.training.trainer import evaluate, evaluate_batches, train

__all__ = [
    "BATCH_NORM",
    "Accuracy",
    "Correct",
    "DatasetExamples",
    "Examples",
    "FrozenBase",
    "GradientComputation",
    "IdleModules",
    "Indices",
    "Learner",
    "LocalOptions",
    "LocalTraining",
    "Loss",
    "MakeOptimizer",
    "PrefetchDataset",
    "Scores",
    "Sgd",
    "Share",
    "SingleProcessGradients",
    "StepSchedule",
    "Sums",
    "TensorExamples",
    "Trainee",
    "as_dataset",
    "build_guarded_algorithm",
    "check_base",
    "check_examples",
    "choose_device",
    "evaluate",
    "evaluate_batches",
    "explain_missing_base",
    "forward_features",
    "iterate_batches",
    "make_examples",
    "read_targets",
    "train",
    "use_seed",
]
