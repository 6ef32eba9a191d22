"""The data: synthetic examples of two classes. Replace `load` with the data of your clients."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from fedplat.simulation.data import Federation

NUM_CLIENTS, NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES = 10, 100, 8, 2
Examples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def load(client: int) -> Examples:
    """Return the inputs [n, features] and the labels [n] of a client; each client has inputs around its own center."""
    rng = np.random.default_rng([1, client])
    inputs = rng.normal(rng.normal(size=NUM_FEATURES) / 2, size=(NUM_EXAMPLES, NUM_FEATURES)).astype(np.float32)
    return inputs, (inputs @ np.linspace(-1, 1, NUM_FEATURES) > 0).astype(np.int64)


def make_federation() -> Federation:
    """Return the data of all clients for a simulation, and test data that no client has."""
    examples = [load(client) for client in range(NUM_CLIENTS)]
    return Federation(
        inputs=np.concatenate([inputs for inputs, _ in examples]),
        targets=np.concatenate([labels for _, labels in examples]),
        parts=np.split(np.arange(NUM_CLIENTS * NUM_EXAMPLES), NUM_CLIENTS),
        test_inputs=load(NUM_CLIENTS)[0],
        test_targets=load(NUM_CLIENTS)[1],
    )
