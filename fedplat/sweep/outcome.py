"""The result of a run, as far as a sweep needs it: the metric by round. It has no time of the computer's clock."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report.summary import Series, collect_federated, find_crossing, series

VIRTUAL_S = "virtual_s"
"""The metric that stands for the virtual seconds since the start of the job."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The quantity that a sweep optimizes: the last or the best value of a metric, and the target of the metric."""

    metric: str
    maximize: bool
    best: bool = False
    target: float = 0.0

    @property
    def sign(self) -> float:
        """1 if larger values are better, -1 if smaller ones are."""
        return 1.0 if self.maximize else -1.0

    def order(self, score: float | None) -> float:
        """Return a number that is larger for a better score; the smallest for none, and for one that is not finite."""
        return self.sign * score if score is not None and math.isfinite(score) else -math.inf


class Outcome(Struct, frozen=True, kw_only=True):
    """The result of a run, or of its rounds up to `until` (0: the run is over).

    `values` is the metric after each of `rounds` that was scored, at the virtual seconds `at_s`; null stands for NaN
    and infinity. `status` is that of the job. `target_round` and `target_s` are interpolated, see `Summary`.
    """

    until: int
    status: str
    rounds: list[int]
    at_s: list[float]
    values: list[float | None]
    target_round: float | None = None
    target_s: float | None = None

    def covers(self, until: int) -> bool:
        """Return whether the run has reached a round; 0 stands for its end."""
        return not self.until or 0 < until <= self.until

    def score(self, objective: Objective, until: int = 0) -> float | None:
        """Return the last or best value up to a round (0: the last round); None without a value."""
        values = [value for number, value in zip(self.rounds, self.values, strict=True) if not until or number <= until]
        if not values:
            return None
        if not objective.best:
            return math.nan if values[-1] is None else values[-1]
        finite = [value for value in values if value is not None]
        return max(finite, key=objective.order, default=math.nan)


def summarize_attempts(attempts: Sequence[AttemptResult], objective: Objective, until: int, status: str) -> Outcome:
    """Return the outcome of attempts. The metric is that on central test data, or else of federated evaluations."""
    line = _find_series(attempts, objective.metric)
    reached = find_crossing(line, objective.sign, objective.target) if objective.target and len(line.values) else None
    return Outcome(
        until=until,
        status=status,
        rounds=[int(number) for number in line.rounds],
        at_s=[float(moment) for moment in line.at_s],
        values=[float(value) if math.isfinite(value) else None for value in line.values],
        target_round=None if reached is None else reached[0],
        target_s=None if reached is None else reached[1],
    )


def list_metrics(attempts: Iterable[AttemptResult]) -> list[str]:
    """Return the names of all metrics that a sweep of such runs could use."""
    names = {VIRTUAL_S}
    for record in attempts:
        names |= record.evaluation.keys()
        if record.kind == "EVALUATE":
            names |= record.metrics.keys()
    return sorted(names)


def _find_series(attempts: Sequence[AttemptResult], metric: str) -> Series:
    if metric == VIRTUAL_S:
        committed = [record for record in attempts if record.kind == "TRAIN" and record.committed]
        ends = np.array([record.ended_at for record in committed])
        return Series(rounds=np.array([record.round for record in committed], np.float64), at_s=ends, values=ends)
    central = series(attempts, metric)
    return central if len(central.values) else collect_federated(attempts, metric)
