"""A small network in NumPy, and the digits of eight silos that have few examples of most digits each.

The data is real: 1,797 handwritten digits of 8 x 8 pixels, included in scikit-learn. A fifth is held out; the rest is
divided by Dirichlet(0.5) for each digit.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from fedplat import Parameters

NUM_SILOS = 8
NUM_CLASSES = 10
HIDDEN = 256
ALPHA = 0.5
SEED = 7
Images = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]


def initial() -> Parameters:
    """Create the initial model: 19,210 parameters. The job file names this function."""
    rng = np.random.default_rng(SEED)
    return Parameters.from_arrays(
        {
            "hidden.weight": rng.normal(0.0, 64**-0.5, (64, HIDDEN)).astype(np.float32),
            "hidden.bias": np.zeros(HIDDEN, np.float32),
            "output.weight": rng.normal(0.0, HIDDEN**-0.5, (HIDDEN, NUM_CLASSES)).astype(np.float32),
            "output.bias": np.zeros(NUM_CLASSES, np.float32),
        }
    )


def silo_data(silo: int) -> tuple[Images, Labels]:
    """Return the data of a silo, 0 to 7."""
    _, parts = _split()
    return parts[silo]


def held_out() -> tuple[Images, Labels]:
    """Return the data that no silo has."""
    return _split()[0]


def train(
    model: Parameters, images: Images, labels: Labels, rate: float, epochs: int, rng: np.random.Generator
) -> float:
    """Train a model in place by gradient descent with batches of 20; return the mean loss of the last epoch."""
    losses: list[float] = []
    for epoch in range(epochs):
        for batch in np.array_split(rng.permutation(len(labels)), max(len(labels) // 20, 1)):
            loss = _descend(model, images[batch], labels[batch], rate)
            losses += [loss] if epoch == epochs - 1 else []
    return float(np.mean(losses))


def evaluate(model: Parameters) -> dict[str, float]:
    """Score a model on the held-out data. A server that has versions calls this function, too."""
    images, labels = held_out()
    _, scores = _forward(model, images)
    return {"accuracy": float((scores.argmax(axis=1) == labels).mean())}


def _forward(model: Parameters, images: Images) -> tuple[Images, Images]:
    hidden = np.maximum(images @ model["hidden.weight"] + model["hidden.bias"], 0.0)
    return hidden, hidden @ model["output.weight"] + model["output.bias"]


def _descend(model: Parameters, images: Images, labels: Labels, rate: float) -> float:
    """Take one step down the gradient of the cross-entropy; return the loss before it."""
    hidden, scores = _forward(model, images)
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    picked = np.arange(len(labels)), labels
    loss = float(-np.log(chances[picked] + 1e-12).mean())
    chances[picked] -= 1.0
    error = chances / len(labels)
    back = (error @ model["output.weight"].T) * (hidden > 0.0)
    model["output.weight"] -= rate * hidden.T @ error
    model["output.bias"] -= rate * error.sum(axis=0)
    model["hidden.weight"] -= rate * images.T @ back
    model["hidden.bias"] -= rate * back.sum(axis=0)
    return loss


@cache
def _split() -> tuple[tuple[Images, Labels], list[tuple[Images, Labels]]]:
    from sklearn.datasets import load_digits  # not at the top: it takes a second

    pixels, targets = load_digits(return_X_y=True)
    images, labels = (np.asarray(pixels) / 16.0).astype(np.float32), np.asarray(targets, np.int64)
    rng = np.random.default_rng(SEED)
    order = rng.permutation(len(labels))
    test, rest = order[: len(order) // 5], order[len(order) // 5 :]
    owner = np.empty(len(rest), np.int64)
    for digit in range(NUM_CLASSES):
        members = np.flatnonzero(labels[rest] == digit)
        shares = rng.dirichlet(np.full(NUM_SILOS, ALPHA))
        owner[members] = rng.choice(NUM_SILOS, size=len(members), p=shares)
    parts = [rest[owner == silo] for silo in range(NUM_SILOS)]
    return (images[test], labels[test]), [(images[part], labels[part]) for part in parts]
