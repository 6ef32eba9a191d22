"""Clients' examples in Ray's object store: a machine fetches those of the clients that it trains, and keeps them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from fedplat.simulation.data.federation import Federation
from fedplat.simulation.engines.ray_worker import Piece, piece_of

_PIECE = 1 << 24
"""Bytes of a piece, about: few objects, none of which holds much that a machine does not need."""


class Pieces:
    """Pieces of some clients each; `put` places one in the store, and gives the reference."""

    def __init__(self, federation: Federation, put: Callable[[Piece], Any]) -> None:
        self._places: list[tuple[Any, tuple[int, int]]] = []
        size = max(1, federation.inputs[0].nbytes + federation.targets[0].nbytes)
        waiting: list[int] = []
        num_waiting = 0
        for client in range(federation.num_clients):
            waiting.append(client)
            num_waiting += federation.num_examples(client)
            if num_waiting * size >= _PIECE or client == federation.num_clients - 1:
                self._place(federation, waiting, put)
                waiting, num_waiting = [], 0

    def place(self, client: int) -> tuple[Any, tuple[int, int]]:
        """Where a client's examples are: the piece, and where they begin and end in it."""
        return self._places[client]

    def _place(self, federation: Federation, clients: list[int], put: Callable[[Piece], Any]) -> None:
        part = np.concatenate([federation.parts[client] for client in clients])
        reference = put(piece_of(federation.inputs[part], federation.targets[part]))
        ends = np.cumsum([0, *(federation.num_examples(client) for client in clients)]).tolist()
        self._places += [(reference, (start, stop)) for start, stop in itertools.pairwise(ends)]
