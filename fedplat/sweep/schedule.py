"""The order of a sweep's work: batches of configurations, and stages of a batch that end at rungs.

`schedule` is a generator: it yields the parts of a stage, receives their outcomes, and decides what follows. It does
no work itself, so a sweep that starts again repeats its decisions from stored outcomes and continues where it ended.
All decisions are made when every part of a stage has ended: they do not depend on the order or the time of the runs.

The decision depends only on scores at that round, never on the time or the order in which runs were computed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedplat.simulation.report.statistics import mean_interval
from fedplat.sweep.outcome import Objective, Outcome
from fedplat.sweep.plan import Configuration, MedianStopping, Stopping, SuccessiveHalving


class RunKey(NamedTuple):
    """A run of a sweep: a configuration's number, and a seed."""

    configuration: int
    seed: int

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return f"{self.configuration:04}-seed{self.seed}"


class RunPart(NamedTuple):
    """Work: a run, until the end of the round `until`, or until its end if that is 0."""

    configuration: Configuration
    seed: int
    until: int

    @property
    def key(self) -> RunKey:
        """The run."""
        return RunKey(self.configuration.number, self.seed)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A configuration and its outcomes by seed. `stopped_after` is the rung after which it was stopped, or 0."""

    configuration: Configuration
    outcomes: Mapping[int, Outcome]
    stopped_after: int = 0

    def score(self, objective: Objective) -> float | None:
        """Return the mean score over seeds; None if a run has none."""
        return mean_score(self.outcomes.values(), objective, self.stopped_after)


ChooseBatch = Callable[[Sequence[Evaluated]], Sequence[Configuration] | None]
"""Returns the next configurations, given all that were evaluated; None at the end."""
Outcomes = Mapping[RunKey, Outcome]


def schedule(
    choose_batch: ChooseBatch, seeds: Sequence[int], objective: Objective, stopping: Stopping | None = None
) -> Generator[list[RunPart], Outcomes, list[Evaluated]]:
    """Yield the parts of each stage, and return all evaluated configurations, in the order of their numbers.

    The caller sends the outcomes of the parts, which may reach beyond their rung.
    """
    evaluated: list[Evaluated] = []
    earlier: dict[int, list[float]] = {}
    rungs = stopping.rounds if stopping is not None else []
    while (batch := choose_batch(evaluated)) is not None:
        found: dict[RunKey, Outcome] = {}
        stopped_after: dict[int, int] = {}
        for until in (*rungs, 0):
            alive = [each for each in batch if each.number not in stopped_after]
            if not alive:
                break
            found |= yield [RunPart(configuration, seed, until) for configuration in alive for seed in seeds]
            if until and stopping is not None:
                scores = {
                    each.number: objective.order(mean_score(_select(found, each, seeds).values(), objective, until))
                    for each in alive
                }
                stopped = choose_stopped(stopping, scores, earlier.setdefault(until, []))
                stopped_after |= dict.fromkeys(stopped, until)
                earlier[until] += scores.values()
        evaluated += [Evaluated(each, _select(found, each, seeds), stopped_after.get(each.number, 0)) for each in batch]
    return evaluated


def once(configurations: Sequence[Configuration]) -> ChooseBatch:
    """Return the function that chooses all configurations in one batch."""
    return lambda evaluated: None if evaluated else configurations


def mean_score(outcomes: Iterable[Outcome], objective: Objective, until: int) -> float | None:
    """Return the mean score of runs up to a round (0: their end); None if one of them has no score."""
    scores = [outcome.score(objective, until) for outcome in outcomes]
    known = [score for score in scores if score is not None]
    return mean_interval(known).mean if known and len(known) == len(scores) else None


def _select(found: Outcomes, configuration: Configuration, seeds: Sequence[int]) -> dict[int, Outcome]:
    return {seed: found[RunKey(configuration.number, seed)] for seed in seeds}


def choose_stopped(stopping: Stopping, scores: Mapping[int, float], earlier: Sequence[float] = ()) -> set[int]:
    """Return the numbers of the configurations to stop.

    `scores` are larger for better configurations, and -inf for those without a finite metric; `earlier` are the scores
    of configurations of earlier batches at the same rung. At least one configuration continues. Of equal ones, those
    with the smallest numbers are the better ones.

    >>> choose_stopped(SuccessiveHalving(rounds=[5]), {1: 0.3, 2: 0.9, 3: 0.5})
    {1}
    >>> choose_stopped(MedianStopping(rounds=[5]), {1: 0.3, 2: 0.9, 3: 0.5})
    {1}
    """
    best_first = sorted(scores, key=lambda number: (-scores[number], number))
    match stopping:
        case SuccessiveHalving():
            # Rounded first: 0.7 * 10 is slightly more than 7 in floating point.
            return set(best_first[max(1, math.ceil(round(stopping.keep * len(scores), 9))) :])
        case MedianStopping():
            known = [*earlier, *scores.values()]
            if len(known) < stopping.min_configurations:
                return set()
            median = statistics.median(known)
            return {number for number in best_first[1:] if scores[number] < median}
