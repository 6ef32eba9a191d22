"""The table of a sweep: a row for each configuration, the best first, with means and intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from fedplat.metrics import find_range
from fedplat.simulation.report.summary import EVERY_NUMBER, mean_interval
from fedplat.sweep import plan, schedule


class MeanCurve(Struct, frozen=True, kw_only=True):
    """The metric by round: its mean over seeds, and the ends of the interval (null for a single seed)."""

    rounds: list[int]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class SweepRow(Struct, frozen=True, kw_only=True):
    """A configuration and its results.

    `score` is the mean over seeds, with its 95 % interval from `low` to `high`; they are null if a run has no finite
    score, and the interval also for a single seed. `scores` are those by seed. `stopped_after` is the round after which
    the configuration was stopped early, or 0; its scores are those at that round. `target_rounds` and `target_s` are
    means over the `num_reached` runs that reached the target. `status` has the distinct final states of the jobs.
    """

    rank: int
    number: int
    values: dict[str, Any]
    status: str
    stopped_after: int
    num_seeds: int
    score: float | None
    low: float | None
    high: float | None
    scores: dict[str, float | None]
    num_reached: int
    target_rounds: float | None
    target_s: float | None
    curve: MeanCurve


def make_table(evaluated: Sequence[schedule.Evaluated], objective: plan.Objective) -> list[SweepRow]:
    """Return a row for each configuration, the best first.

    Stopped configurations follow the others, those that were stopped last first. Configurations without a finite score
    are the last ones of their group, and equal ones are in the order of their numbers.
    """

    def order(each: schedule.Evaluated) -> tuple[float, ...]:
        stopped = each.stopped_after
        return stopped > 0, -stopped, -objective.order(each.score(objective)), each.configuration.number

    return [_make_row(rank, each, objective) for rank, each in enumerate(sorted(evaluated, key=order), 1)]


def _make_row(rank: int, each: schedule.Evaluated, objective: plan.Objective) -> SweepRow:
    until = each.stopped_after
    scores = {str(seed): _finite(outcome.score(objective, until)) for seed, outcome in each.outcomes.items()}
    known = [score for score in scores.values() if score is not None]
    interval = mean_interval(known, bounds=_range(each, objective)) if len(known) == len(scores) else None
    reached = [
        (outcome.target_round, outcome.target_s)
        for outcome in each.outcomes.values()
        if outcome.target_round is not None
        and outcome.target_s is not None
        # A run may have been computed beyond the rung at which its configuration was stopped.
        and (not until or outcome.target_round <= until)
    ]
    states = sorted({outcome.status for outcome in each.outcomes.values() if not until})
    return SweepRow(
        rank=rank,
        number=each.configuration.number,
        values=dict(each.configuration.values),
        status="STOPPED" if until else ", ".join(states),
        stopped_after=until,
        num_seeds=len(scores),
        score=None if interval is None else interval.mean,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        scores=scores,
        num_reached=len(reached),
        target_rounds=mean_interval(rounds for rounds, _ in reached).mean if reached else None,
        target_s=mean_interval(seconds for _, seconds in reached).mean if reached else None,
        curve=make_curve(each.outcomes, until, _range(each, objective)),
    )


def _range(each: schedule.Evaluated, objective: plan.Objective) -> tuple[float, float]:
    """Return the possible values of the metric; seconds are at least 0."""
    if objective.metric == plan.VIRTUAL_S:
        return 0.0, math.inf
    return find_range(objective.metric, (_number(value) for each in each.outcomes.values() for value in each.values))


def make_curve(
    outcomes: Mapping[int, plan.Outcome], until: int = 0, bounds: tuple[float, float] = EVERY_NUMBER
) -> MeanCurve:
    """Return the mean of the metric over seeds, for the rounds up to `until` (0: all) that all runs have scored."""
    values = [dict(zip(outcome.rounds, outcome.values, strict=True)) for outcome in outcomes.values()]
    shared = sorted(set.intersection(*(set(each) for each in values))) if values else []
    rounds = [number for number in shared if not until or number <= until]
    intervals = [mean_interval((_number(each[number]) for each in values), bounds=bounds) for number in rounds]
    return MeanCurve(
        rounds=rounds,
        mean=[_finite(interval.mean) for interval in intervals],
        low=[_finite(interval.low) for interval in intervals],
        high=[_finite(interval.high) for interval in intervals],
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
