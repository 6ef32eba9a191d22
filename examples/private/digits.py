"""Logistic regression on handwritten digits in NumPy, the data that each client holds, and the server's score.

The data is real: 1,797 digits of 8 x 8 pixels that come with scikit-learn. A fifth is held out for the server; the rest
is dealt out to the clients, about 24 each.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

from fedplat.model import Parameters

NUM_CLIENTS = 60
NUM_CLASSES = 10
SEED = 7
Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def initial() -> Parameters:
    """The model of round 1: 650 zeros. The job file names this function."""
    return Parameters.from_arrays(
        {"weight": np.zeros((64, NUM_CLASSES), np.float32), "bias": np.zeros(NUM_CLASSES, np.float32)}
    )


def client_data(client: int) -> tuple[Images, Labels]:
    """What client 0 to 59 holds."""
    images, labels, num_held_out = _data()
    part = slice(num_held_out + client, None, NUM_CLIENTS)
    return images[part], labels[part]


def held_out() -> tuple[Images, Labels]:
    """What nobody trains on."""
    images, labels, num_held_out = _data()
    return images[:num_held_out], labels[:num_held_out]


def train(parameters: Parameters, images: Images, labels: Labels, rate: float, steps: int) -> None:
    """Steps of gradient descent on all of a client's images, in place."""
    for _ in range(steps):
        error = _probabilities(parameters, images)
        error[np.arange(len(labels)), labels] -= 1.0
        parameters["weight"][...] -= rate * images.T @ error / len(labels)
        parameters["bias"][...] -= rate * error.mean(axis=0)


def evaluate(parameters: Parameters) -> dict[str, float]:
    """Scores a model version; the server calls this in a process of its own."""
    images, labels = held_out()
    found = _probabilities(parameters, images).argmax(axis=1)
    return {"accuracy": float((found == labels).mean())}


def _probabilities(parameters: Parameters, images: Images) -> Images:
    scores = images @ parameters["weight"] + parameters["bias"]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


@cache
def _data() -> tuple[Images, Labels, int]:
    """All images and labels in random order, and how many of them are held out."""
    pixels, targets = load_digits(return_X_y=True)
    images, labels = (np.asarray(pixels) / 16.0).astype(np.float32), np.asarray(targets, np.int64)
    order = np.random.default_rng(SEED).permutation(len(labels))
    return images[order], labels[order], len(labels) // 5
