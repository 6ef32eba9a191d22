"""What honest clients of the soak learn: linear models of data that one true model made, with noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_WEIGHTS = 64
NUM_EXAMPLES = 256
NOISE = 0.1
TRUE: NDArray[np.float32] = np.random.default_rng(0).normal(size=NUM_WEIGHTS).astype(np.float32)


def solution(number: int) -> NDArray[np.float32]:
    """The least-squares model of the data of one client, which are its own."""
    rng = np.random.default_rng([1, number])
    inputs = rng.normal(size=(NUM_EXAMPLES, NUM_WEIGHTS))
    targets = inputs @ TRUE + NOISE * rng.normal(size=NUM_EXAMPLES)
    return np.linalg.lstsq(inputs, targets)[0].astype(np.float32)


def error(weight: NDArray[np.float32]) -> float:
    """How far a model is from the true one, as a share of the true one's norm; infinite if it is not finite."""
    distance = float(np.linalg.norm(weight.astype(np.float64) - TRUE) / np.linalg.norm(TRUE))
    return distance if np.isfinite(distance) else float("inf")
