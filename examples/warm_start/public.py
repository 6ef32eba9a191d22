"""The server's trainer: the clients' logistic regression in PyTorch, on the public part of the digits.

Register it with `--trainer digits=examples/warm_start/public.py:trainer`. Only ranks import it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shares
from fedplat.pytorch.server import ServerTrainer


class Logistic(nn.Module):
    """The clients' model as a module: its parameters have the same names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 10))
        self.bias = nn.Parameter(torch.zeros(10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the scores of the classes, shape [batch, 10]."""
        return images @ self.weight + self.bias


def public_data() -> TensorDataset:
    """Return the training data."""
    return TensorDataset(*map(torch.from_numpy, shares.public_data()))


def held_out() -> TensorDataset:
    """Return the fifth of the digits that is not used for training."""
    return TensorDataset(*map(torch.from_numpy, shares.held_out()))


trainer = ServerTrainer(model=Logistic, data=public_data, evaluation=held_out)
