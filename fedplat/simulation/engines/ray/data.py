"""Clients' examples in Ray's object store: a machine fetches and caches those of the clients that it trains."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedplat.simulation.data.federation import Federation, Part
from fedplat.simulation.engines.ray.worker import Piece

_PIECE = 1 << 24
"""The approximate size of a piece in bytes: few objects, and little in each that a machine does not need."""


class DataShards:
    """Pieces with the `parts` of several clients each; `put` stores inputs and targets and returns their reference."""

    def __init__(self, federation: Federation, parts: Sequence[Part], put: Callable[[Piece], Any]) -> None:
        self._spans: list[tuple[Any, tuple[int, int]]] = []
        size = max(1, federation.inputs[0].nbytes + federation.targets[0].nbytes)
        waiting: list[Part] = []
        num_waiting = 0
        for part in parts:
            waiting.append(part)
            num_waiting += len(part)
            if num_waiting * size >= _PIECE:
                self._place(federation, waiting, put)
                waiting, num_waiting = [], 0
        if waiting:
            self._place(federation, waiting, put)

    def place(self, client: int) -> tuple[Any, tuple[int, int]]:
        """Return the reference of the piece with a client's examples, and their range (start, stop) in it."""
        return self._spans[client]

    def _place(self, federation: Federation, parts: list[Part], put: Callable[[Piece], Any]) -> None:
        indices = np.concatenate(parts)
        reference = put((federation.inputs[indices], federation.targets[indices]))
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        self._spans += [(reference, (start, stop)) for start, stop in itertools.pairwise(ends)]
