"""What a reply claims: its number of examples and its metrics, as a fedplat client reports them."""

from __future__ import annotations

import math

from flwr.app import MetricRecord, RecordDict

from fedplat import claims
from fedplat.claims import DEFAULT_LIMITS

NUM_EXAMPLES = ("num-examples", "num_examples")
"""The names of the number of examples: that of Flower's strategies, and that of its old API."""


def read_claims(content: RecordDict) -> tuple[float, dict[str, float]]:
    """Return the number of examples of a reply (1 if it has none), and those of its metrics that can be reported.

    The reply itself keeps all metrics: these are what fedplat shows.
    """
    num_examples, metrics = 1.0, dict[str, float]()
    name_bytes = 0
    for record in content.values():
        if not isinstance(record, MetricRecord):
            continue
        for name, value in record.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            if name in NUM_EXAMPLES:
                num_examples = 1.0 if claims.check_examples(value) else float(value)
                continue
            name_bytes += len(name.encode())
            fits = len(metrics) < DEFAULT_LIMITS.num_metrics and name_bytes <= DEFAULT_LIMITS.name_bytes
            if fits and not claims.check_metrics({name: float(value)}):
                metrics[name] = float(value)
    return num_examples, metrics
