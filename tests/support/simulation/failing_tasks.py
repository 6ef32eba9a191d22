"""Trainings that fail, or never end."""

from __future__ import annotations

import signal

import torch
from torch import nn

from support.simulation.tasks import SIDE


class Stuck(nn.Module):
    """Stays in its forward pass until its process is killed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE * SIDE, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        signal.pause()
        return inputs.flatten(1) @ self.weight


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIDE * SIDE, 4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) == 1:
            raise ArithmeticError("one example is not enough")
        return inputs.flatten(1) @ self.weight
