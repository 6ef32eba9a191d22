"""The server's trainer: the same logistic regression in PyTorch, on a small public part of the digits.

The public part has no 7, 8 or 9: these only the clients can teach.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).resolve().parents[1] / "private"))

import digits
from fedplat.backends.parallel import ServerTrainer

CLIENTS = 4
PUBLIC = range(48, digits.NUM_CLIENTS)
"""The shares of the digits that are public; the clients hold the others."""

initial = digits.initial


def client_data(client: int) -> tuple[digits.Images, digits.Labels]:
    """What client 0 to 3 holds: a quarter of what is not public."""
    return _together(range(client, PUBLIC.start, CLIENTS))


def public_data() -> TensorDataset:
    """What the server may use: about 200 digits."""
    images, labels = _together(PUBLIC)
    known = labels < 7
    return TensorDataset(torch.from_numpy(images[known]), torch.from_numpy(labels[known]))


def held_out() -> TensorDataset:
    """The fifth that nobody trains on."""
    images, labels = digits.held_out()
    return TensorDataset(torch.from_numpy(images), torch.from_numpy(labels))


class Logistic(nn.Module):
    """The model of `digits.py` as a module: its parameters have the same names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, digits.NUM_CLASSES))
        self.bias = nn.Parameter(torch.zeros(digits.NUM_CLASSES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes, [batch, 10]."""
        return images @ self.weight + self.bias


def _together(shares: range) -> tuple[digits.Images, digits.Labels]:
    images, labels = zip(*map(digits.client_data, shares), strict=True)
    return np.concatenate(images), np.concatenate(labels)


trainer = ServerTrainer(model=Logistic, data=public_data, evaluation=held_out)
