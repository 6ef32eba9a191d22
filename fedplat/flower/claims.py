"""Numbers of Flower apps that fedplat stores and shows: what a reply claims, and the metrics of a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median_low

from flwr.app import MetricRecord, RecordDict

from fedplat import claims
from fedplat.claims import DEFAULT_LIMITS
from fedplat.flower.messages import NUM_EXAMPLES

MIN_CLAIMS = 3
"""With fewer replies there is no majority: either of two could be the wrong one."""
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


def limit_old_claims(contents: Mapping[str, RecordDict], factor: float) -> list[str]:
    """Limit the numbers of examples in replies of Flower's old API, in place; return what was wrong, by their names.

    None counts for more than `factor` times the median of three or more; 0: no limit. Its strategies divide by the sum,
    and the mean of replies without any example is NaN.
    """
    records = {
        name: record
        for name, content in contents.items()
        for key, record in content.metric_records.items()
        if key.endswith(f".{_OLD_NUM_EXAMPLES}") and isinstance(record.get(_OLD_NUM_EXAMPLES), int)
    }
    values = {name: int(record[_OLD_NUM_EXAMPLES]) for name, record in records.items()}  # type: ignore[arg-type]
    if values and not any(values.values()):
        return [f"the {_OLD_NUM_EXAMPLES} of all {len(values)} replies add up to 0 ({', '.join(sorted(values)[:5])})"]
    if not factor or len(values) < MIN_CLAIMS:
        return []
    most = int(factor * median_low(values.values()))
    heavy = {name: value for name, value in values.items() if value > most > 0}
    for name in heavy:
        records[name][_OLD_NUM_EXAMPLES] = most
    return [
        f"the {_OLD_NUM_EXAMPLES} = {value:g} of {name} counts as {most}, {factor:g} times the median "
        "(flower.max_weight_factor)"
        for name, value in heavy.items()
    ]


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
