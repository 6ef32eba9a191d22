"""Bounds on the numbers that a client may report: the SDK, the server and the simulator check the same ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

MIN_EXAMPLES, MAX_EXAMPLES = 1e-6, 1e15
"""Within these bounds, sums and quotients of weights are finite in float32."""
MAX_NAME_BYTES = 100


@dataclasses.dataclass(frozen=True)
class MetricLimits:
    """Limits on a report: the number of metrics, and the bytes of UTF-8 that their names have in total."""

    num_metrics: int = 64
    name_bytes: int = 4096


DEFAULT_LIMITS = MetricLimits()


def check_examples(num_examples: float) -> str:
    """Return what is wrong with a claimed number of examples, or "".

    >>> check_examples(0.0)
    'num_examples is 0; expected a number from 1e-06 to 1e+15'
    """
    if MIN_EXAMPLES <= num_examples <= MAX_EXAMPLES:
        return ""
    return f"num_examples is {num_examples:g}; expected a number from {MIN_EXAMPLES:g} to {MAX_EXAMPLES:g}"


def check_metrics(metrics: Mapping[str, float], limits: MetricLimits = DEFAULT_LIMITS) -> str:
    """Return what is wrong with reported metrics, or ""."""
    if len(metrics) > limits.num_metrics:
        return f"{len(metrics)} metrics; at most {limits.num_metrics} are accepted"
    name_bytes = 0
    for name, value in metrics.items():
        size = len(name.encode(errors="replace"))  # what is not UTF-8 is not printable
        if not 1 <= size <= MAX_NAME_BYTES or not name.isprintable():
            return f"the metric {name[:80]!r} has {size} bytes; expected 1 to {MAX_NAME_BYTES} bytes of printable UTF-8"
        if not math.isfinite(value):
            advice = "leave a metric out that this client cannot measure, unless the training has diverged"
            return f"the metric {name!r} is {value}; expected a finite number: {advice}"
        name_bytes += size
    if name_bytes > limits.name_bytes:
        return f"the names of the metrics have {name_bytes} bytes in all; at most {limits.name_bytes} are accepted"
    return ""
