"""The data: a scene of "Romeo and Juliet", of which each client has a part. Replace `load` with your clients' texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from fedplat.simulation.data import Federation

import model

NUM_CLIENTS, LENGTH = 4, 64
TEXT = Path(__file__).with_name("text.txt").read_text("utf-8")
Examples = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def load(client: int) -> Examples:
    """Return sequences of tokens [n, time] of a client, and the token that follows each of them.

    In the second array -100 would stand for what does not count, such as padding.
    """
    size = len(TEXT) // (NUM_CLIENTS + 1)
    part = TEXT[client * size : (client + 1) * size]
    tokens = np.array(model.make_tokenizer()(part, add_special_tokens=False).input_ids)
    end = (len(tokens) - 1) // LENGTH * LENGTH
    return tokens[:end].reshape(-1, LENGTH), tokens[1 : end + 1].reshape(-1, LENGTH)


def make_federation() -> Federation:
    """Return the data of all clients for a simulation, and test data that no client has."""
    examples = [load(client) for client in range(NUM_CLIENTS)]
    ends = np.cumsum([len(tokens) for tokens, _ in examples])
    return Federation(
        inputs=np.concatenate([tokens for tokens, _ in examples]),
        targets=np.concatenate([following for _, following in examples]),
        parts=np.split(np.arange(ends[-1]), ends[:-1]),
        test_inputs=load(NUM_CLIENTS)[0],
        test_targets=load(NUM_CLIENTS)[1],
    )
