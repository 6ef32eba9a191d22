"""The rounds of a run as metrics for experiment trackers. Times are virtual, also those of MLflow and TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator

from fedplat.simulation.recording.result import AttemptResult
from fedplat.trackers import RoundMetrics


def metrics_of(record: AttemptResult) -> RoundMetrics | None:
    """Return the metrics of an attempt that was committed; None if it was not.

    `held_out/` are scores on the central test data, `clients/` the means of the clients' metrics in training, and
    `evaluation/` those in a federated evaluation.
    """
    return RoundMetrics(record.round, record.ended_at, dict(_metrics(record))) if record.committed else None


def _metrics(record: AttemptResult) -> Iterator[tuple[str, float]]:
    is_training = record.kind == "TRAIN"
    for name, value in record.evaluation.items():
        yield f"held_out/{name}", value
    for name, value in record.metrics.items():
        yield f"{'clients' if is_training else 'evaluation'}/{name}", value
    if is_training:
        yield "round/virtual_seconds", record.ended_at - record.opened_at
        yield "round/attempts", float(record.attempt)
        yield "round/bytes_down", record.bytes_down
        yield "round/bytes_up", record.bytes_up
        for name, count in record.counts.items():
            yield f"round/{name.lower()}", float(count)
        if merged := sum(record.staleness.values()):
            yield "round/staleness", sum(age * count for age, count in record.staleness.items()) / merged
