"""Logistic regression on handwritten digits in NumPy, the data of each client, and the server's evaluator.

The data is real: 1,797 digits of 8 x 8 pixels, included in scikit-learn. A fifth is held out for the server; the rest
is divided among the clients, about 24 each.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from fedplat import Parameters

NUM_CLIENTS = 60
NUM_CLASSES = 10
SEED = 7
Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def initial() -> Parameters:
    """Create the initial model: 650 zeros. The job file names this function."""
    return Parameters.from_arrays(
        {"weight": np.zeros((64, NUM_CLASSES), np.float32), "bias": np.zeros(NUM_CLASSES, np.float32)}
    )


def client_data(client: int, num_clients: int = NUM_CLIENTS) -> tuple[Images, Labels]:
    """Return the data of a client, from 0 on."""
    images, labels, num_held_out = _data()
    part = slice(num_held_out + client, None, num_clients)
    return images[part], labels[part]


def held_out() -> tuple[Images, Labels]:
    """Return the held-out data, which no client has."""
    images, labels, num_held_out = _data()
    return images[:num_held_out], labels[:num_held_out]


def train(parameters: Parameters, images: Images, labels: Labels, rate: float, steps: int) -> None:
    """Update `parameters` in place with steps of gradient descent on all images of a client."""
    for _ in range(steps):
        error = _probabilities(parameters, images)
        error[np.arange(len(labels)), labels] -= 1.0
        parameters["weight"][...] -= rate * images.T @ error / len(labels)
        parameters["bias"][...] -= rate * error.mean(axis=0)


def evaluate(parameters: Parameters) -> dict[str, float]:
    """Score a model version. The server calls this function in a separate process."""
    images, labels = held_out()
    predictions = _probabilities(parameters, images).argmax(axis=1)
    return {"accuracy": float((predictions == labels).mean())}


def _probabilities(parameters: Parameters, images: Images) -> Images:
    scores = images @ parameters["weight"] + parameters["bias"]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True)


@cache
def _data() -> tuple[Images, Labels, int]:
    """Return all images and labels in random order, and the number of held-out ones."""
    from sklearn.datasets import load_digits  # not at the top: clients with their own files do not need it

    pixels, targets = load_digits(return_X_y=True)
    images, labels = (np.asarray(pixels) / 16.0).astype(np.float32), np.asarray(targets, np.int64)
    order = np.random.default_rng(SEED).permutation(len(labels))
    return images[order], labels[order], len(labels) // 5
