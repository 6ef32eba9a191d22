"""Numbers of Flower apps that fedplat stores and shows: what a reply claims, and the metrics of a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flwr.app import MetricRecord, RecordDict

from fedplat import claims
from fedplat.claims import DEFAULT_LIMITS
from fedplat.flower.messages import NUM_EXAMPLES

_OLD_NUM_EXAMPLES = "num_examples"
"""The name of the number of examples in Flower's old API."""


def read_claims(content: RecordDict) -> tuple[float, dict[str, float]]:
    """Return the number of examples of a reply (1 if it has none), and those of its metrics that can be reported.

    The reply itself keeps all metrics: these are what fedplat shows.
    """
    num_examples, metrics = 1.0, list[tuple[str, object]]()
    for record in content.values():
        if not isinstance(record, MetricRecord):
            continue
        for name, value in record.items():
            if name not in (NUM_EXAMPLES, _OLD_NUM_EXAMPLES):
                metrics.append((name, value))
            elif isinstance(value, int | float):
                num_examples = 1.0 if claims.check_examples(value) else float(value)
    return num_examples, select_metrics(metrics)


def select_metrics(values: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Return the values that can be reported as metrics: finite numbers, as many as a report may have."""
    metrics = dict[str, float]()
    name_bytes = 0
    for name, value in values:
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        name_bytes += len(name.encode()) if name not in metrics else 0
        fits = len(metrics) < DEFAULT_LIMITS.num_metrics and name_bytes <= DEFAULT_LIMITS.name_bytes
        if (fits or name in metrics) and not claims.check_metrics({name: float(value)}):
            metrics[name] = float(value)
    return metrics
