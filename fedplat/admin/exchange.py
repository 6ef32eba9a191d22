"""The exchanges of a decentralised job in words, for commands and pages."""

from __future__ import annotations

from collections.abc import Sequence

from fedplat.texts import format_count
from fedplat.wire.v1 import admin_pb2


def describe(exchange: admin_pb2.Exchange) -> str:
    """Describe the exchanges of a decentralised job: the topology, the silos, the edges, and how far apart they are."""
    kind = "ring all-reduce" if exchange.kind == "ring" else f"{exchange.kind}, topology {exchange.topology}"
    text = f"{kind}, {format_count(exchange.num_silos, 'silo')}"
    if exchange.num_edges:
        text += f", {exchange.num_confirmed:,} of {format_count(exchange.num_edges, 'edge')} confirmed last"
    if exchange.HasField("relative_distance"):
        text += f"; distance from the mean {exchange.relative_distance:.3g}"
        if exchange.kind != "ring":  # a ring needs none: it computes the mean whatever the distance is
            text += f" (tolerance {exchange.tolerance:g})"
    if exchange.excluded:
        text += f"; rings leave out {', '.join(exchange.excluded)}"
    return text


def count_settling(number: int, num_rounds: int) -> int:
    """Return how many of the rounds so far had no training: those of a decentralised job after its last training.

    `num_rounds` is that of the job; 0 if a Flower app decides.
    """
    return max(0, number - num_rounds) if num_rounds else 0


def join_names(names: Sequence[str], total: int) -> str:
    """Join the first names of `total` ones."""
    more = total - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
