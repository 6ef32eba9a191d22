"""Training in a single process, or in those that torchrun started (`fedplat_client.trainers.distributed`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from fedplat.pytorch import training

Made = TypeVar("Made")
AfterStep = Callable[[int, int], bool]


class TrainingStrategy(Protocol):
    """How a trainer's work is divided among processes."""

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        ...

    def make_on_all(self, make: Callable[[], Made]) -> Made:
        """Return the result of `make` if it succeeds in all processes; otherwise raise in all of them."""
        ...

    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Raise `ValueError` if there are too few examples for the processes."""
        ...

    def make_gradients(self, seed: int) -> training.GradientComputation:
        """Return the gradient computation."""
        ...

    def after_step(self, after_step: AfterStep) -> AfterStep:
        """Return a callback that makes all processes follow the decision of one `after_step`: continue or stop."""
        ...


class SingleProcess:
    """Training in one process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

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
