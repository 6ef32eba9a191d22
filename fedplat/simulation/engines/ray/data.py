"""Clients' examples in Ray's object store: a machine fetches those of the clients that it trains, and keeps them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fedplat.simulation.data.federation import Federation, Part
from fedplat.simulation.engines.ray.worker import Piece, piece_of

_PIECE = 1 << 24
"""Bytes of a piece, about: few objects, none of which holds much that a machine does not need."""


class DataShards:
    """Pieces of some clients' `parts` each; `put` places one in the store, and gives the reference."""

    def __init__(self, federation: Federation, parts: Sequence[Part], put: Callable[[Piece], Any]) -> None:
        self._places: list[tuple[Any, tuple[int, int]]] = []
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
        """Where a client's examples are: the piece, and where they begin and end in it."""
        return self._places[client]

    def _place(self, federation: Federation, parts: list[Part], put: Callable[[Piece], Any]) -> None:
        whole = np.concatenate(parts)
        reference = put(piece_of(federation.inputs[whole], federation.targets[whole]))
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        self._places += [(reference, (start, stop)) for start, stop in itertools.pairwise(ends)]
