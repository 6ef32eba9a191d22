"""With whom a process trains: by itself, or with those that torchrun started (`crew.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from fedplat.pytorch import training

Made = TypeVar("Made")
AfterStep = Callable[[int, int], bool]


class TrainingStrategy(Protocol):
    """What training in several processes asks of a trainer."""

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        ...

    def make_on_all(self, make: Callable[[], Made]) -> Made:
        """What `make` gives, if it gives something in all processes; else all of them raise."""
        ...

    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Raises `ValueError` where so few examples are not enough for all."""
        ...

    def passes(self, seed: int) -> training.GradientComputation:
        """How gradients come about."""
        ...

    def after_step(self, after_step: AfterStep) -> AfterStep:
        """What all do after a step, where one of them alone decides by `after_step` whether to go on."""
        ...


class SingleProcess:
    """No company: one process does everything."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def make_on_all(self, make: Callable[[], Made]) -> Made:
        """What `make` gives."""
        return make()

    def check(self, trainee: training.Trainee, num_examples: int) -> None:
        """Nothing is too few."""

    def passes(self, seed: int) -> training.GradientComputation:
        """How gradients come about."""
        return training.SingleProcessGradients()

    def after_step(self, after_step: AfterStep) -> AfterStep:
        """What it decides."""
        return after_step
