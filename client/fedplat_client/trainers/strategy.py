"""Training in a single process, or in those that a launcher started: data-parallel, or in a layout.

The latter are in `fedplat_client.trainers.distributed` and `fedplat_client.trainers.layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, TypeAlias, TypeVar

import torch

from fedplat.model import Parameters
from fedplat.pytorch import training
from fedplat_client.task import Task, TrainResult

Made = TypeVar("Made")
Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
AfterStep = Callable[[int, int], bool]


class TrainingStrategy(Protocol):
    """How a trainer's work is divided among processes."""

    device: torch.device
    """The device that this process computes on."""
    parameters: Parameters
    """The model to start from, which the training changes in place."""

    def make_on_all(self, make: Callable[[], Made]) -> Made:
        """Return the result of `make` if it succeeds in all processes; otherwise raise in all of them."""
        ...

    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Raise `ValueError` if there are too few examples for the processes."""

    def make_trainee(self, learner: training.Learner, seed: int, precision: Precision) -> training.Trainee:
        """Make the module, or this process's part of it: here all. Raises `ValueError` if it cannot be divided."""
        return training.Trainee(learner, self.device, seed)

    def make_gradients(self, seed: int) -> training.GradientComputation:
        """Return the gradient computation."""
        ...

    def make_result(self, num_examples: int, metrics: Mapping[str, float]) -> TrainResult:
        """Return the result of a training that has changed `parameters`."""
        return TrainResult(parameters=self.parameters, num_examples=num_examples, metrics=metrics)

    def after_step(self, after_step: AfterStep) -> AfterStep:
        """Return a callback that makes all processes follow the decision of one `after_step`: continue or stop."""
        ...


class SingleProcess(TrainingStrategy):
    """Training in one process."""

    def __init__(self, device: torch.device, task: Task) -> None:
        self.device = device
        self.parameters = task.parameters

    def make_on_all(self, make: Callable[[], Made]) -> Made:
        """Call `make`."""
        return make()

    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Accept any number of examples."""

    def make_gradients(self, seed: int) -> training.GradientComputation:
        """Return the gradient computation of one process."""
        return training.SingleProcessGradients()

    def after_step(self, after_step: AfterStep) -> AfterStep:
        """Return `after_step` itself."""
        return after_step
