"""The model of the digits job, and the data of each client and of the server.

The data is real: 1,797 handwritten digits of 8 x 8 pixels, included in scikit-learn. A fifth is held out for the
server's evaluation; the rest is divided among the clients by Dirichlet(0.5), so that every client has its own mixture
of digits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 10
NUM_CLIENTS = 10
ALPHA = 0.5
SEED = 7


def build() -> nn.Module:
    """Build a small convolutional network with 38,282 parameters, including BatchNorm."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 54),
        nn.ReLU(),
        nn.Linear(54, NUM_CLASSES),
    )


def initial() -> nn.Module:
    """Build the initial model. The job file names this function."""
    torch.manual_seed(SEED)
    return build()


def held_out() -> TensorDataset:
    """Return the fifth of the data that no client has."""
    images, labels, _ = _split()
    return _dataset(images, labels)


def client_data(client: int) -> TensorDataset:
    """Return the data of client 0 to 9."""
    if not 0 <= client < NUM_CLIENTS:
        raise ValueError(f"there is no client {client}; expected 0 to {NUM_CLIENTS - 1}")
    _, _, shares = _split()
    return _dataset(*shares[client])


_Share = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def _split() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], list[_Share]]:
    pixels, digits = load_digits(return_X_y=True)
    images, labels = (np.asarray(pixels) / 16.0).astype(np.float32), np.asarray(digits, np.int64)
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(labels))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    owner = np.empty(len(train), np.int64)
    for digit in range(NUM_CLASSES):
        members = np.flatnonzero(labels[train] == digit)
        shares = rng.dirichlet(np.full(NUM_CLIENTS, ALPHA))
        owner[members] = rng.choice(NUM_CLIENTS, size=len(members), p=shares)
    parts = [train[owner == client] for client in range(NUM_CLIENTS)]
    return images[test], labels[test], [(images[part], labels[part]) for part in parts]


def _dataset(images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(images.reshape(-1, 8, 8)), torch.from_numpy(labels))
