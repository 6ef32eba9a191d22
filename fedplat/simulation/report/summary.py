"""The summary of a run: its most important numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.metrics import is_smaller_better
from fedplat.simulation.recording.result import AttemptResult, Result

Floats = npt.NDArray[np.float64]


class MetricValue(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a metric, and the round and virtual second in which it was reached."""

    value: float
    round: int
    at_s: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The last and the best value of `metric` on held-out data, and where it first reached `target`.

    `rounds_to_target` is interpolated between evaluated rounds, along the running best, as in McMahan et al. 2017
    (section 3); None if the target was not reached or is not set. `of_clients` is the metric that clients reported in
    the last round, weighted by their examples; `federated` is that of the last federated evaluation, on the examples
    that clients keep from training.
    """

    metric: str
    last: MetricValue | None = None
    best: MetricValue | None = None
    target: float = 0.0
    rounds_to_target: float | None = None
    seconds_to_target: float | None = None
    of_clients: float | None = None
    federated: MetricValue | None = None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of the evaluated rounds, as arrays of equal length."""

    rounds: Floats
    at_s: Floats
    values: Floats


def series(attempts: Sequence[AttemptResult], metric: str) -> Series:
    """Return a metric on the central test data, in the order of the rounds."""
    scored = [record for record in attempts if record.committed and metric in record.evaluation]
    return _series(scored, [record.evaluation[metric] for record in scored])


def collect_federated(attempts: Sequence[AttemptResult], metric: str) -> Series:
    """Return a metric of the federated evaluations: the mean over the examples that clients keep from training."""
    scored = [each for each in attempts if each.kind == "EVALUATE" and each.committed and metric in each.metrics]
    return _series(scored, [record.metrics[metric] for record in scored])


def summarize(result: Result, metric: str = "accuracy", target: float = 0.0) -> Summary:
    """Summarize a run."""
    central = series(result.attempts, metric)
    trained = [record for record in result.attempts if record.kind == "TRAIN" and metric in record.metrics]
    of_clients = trained[-1].metrics[metric] if trained else None
    of_evaluations = collect_federated(result.attempts, metric)
    on_clients = _score(of_evaluations, -1) if len(of_evaluations.values) else None
    if not len(central.values):
        return Summary(metric=metric, target=target, of_clients=of_clients, federated=on_clients)
    sign = -1.0 if is_smaller_better(metric) else 1.0
    best = int(np.nanargmax(sign * central.values)) if np.isfinite(central.values).any() else len(central.values) - 1
    reached = find_crossing(central, sign, target) if target else None
    return Summary(
        metric=metric,
        last=_score(central, -1),
        best=_score(central, best),
        target=target,
        rounds_to_target=None if reached is None else reached[0],
        seconds_to_target=None if reached is None else reached[1],
        of_clients=of_clients,
        federated=on_clients,
    )


def _series(scored: Sequence[AttemptResult], values: Sequence[float]) -> Series:
    return Series(
        rounds=np.array([record.round for record in scored], np.float64),
        at_s=np.array([record.ended_at for record in scored]),
        values=np.array(values, np.float64),
    )


def _score(line: Series, index: int) -> MetricValue:
    return MetricValue(value=float(line.values[index]), round=int(line.rounds[index]), at_s=float(line.at_s[index]))


def find_crossing(line: Series, sign: float, target: float) -> tuple[float, float] | None:
    """Return the round and moment at which the running best reaches the target, interpolated between two rounds."""
    best = np.fmax.accumulate(sign * line.values)
    above = np.flatnonzero(best >= sign * target)
    if not len(above):
        return None
    index = int(above[0])
    if index == 0:
        return float(line.rounds[0]), float(line.at_s[0])
    before, after = best[index - 1], best[index]
    part = (sign * target - before) / (after - before) if np.isfinite(before) else 1.0
    return tuple(  # pyright: ignore[reportReturnType] - two numbers
        float(axis[index - 1] + part * (axis[index] - axis[index - 1])) for axis in (line.rounds, line.at_s)
    )
