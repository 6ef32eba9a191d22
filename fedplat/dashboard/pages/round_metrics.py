"""The metrics of rounds: which of them a chart shows, and the best value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fedplat.metrics import is_smaller_better
from fedplat.wire.v1 import admin_pb2

_PREFERRED = ("accuracy", "loss", "relative_distance", "confirmed_edges")


def metric_values(each: admin_pb2.Round) -> dict[str, float]:
    """Return the metrics of a round: those of the server's evaluator, and of the clients where it has none."""
    return {**each.client_metrics, **each.server_metrics}


def metric_names(rounds: Iterable[admin_pb2.Round]) -> list[str]:
    """Return the metrics of some rounds, the most useful first: those of the evaluator, then `_PREFERRED`."""
    server = Counter[str]()
    found = Counter[str]()
    for each in rounds:
        server.update(each.server_metrics.keys())
        found.update(metric_values(each).keys())
    order = {name: position for position, name in enumerate(_PREFERRED)}
    return sorted(found, key=lambda name: (-min(server[name], 1), order.get(name, len(order)), -found[name], name))


def main_metric(rounds: Sequence[admin_pb2.Round]) -> str:
    """Return the first of `metric_names`; empty without metrics."""
    return next(iter(metric_names(rounds)), "")


def best(values: Mapping[int, float], name: str) -> tuple[int, float]:
    """Return the round with the best value of a metric, and that value."""
    choose = min if is_smaller_better(name) else max
    at = choose(values, key=lambda round_: values[round_])
    return at, values[at]
