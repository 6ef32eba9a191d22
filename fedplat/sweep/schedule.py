"""The order of a sweep's work: batches, their stages, and a search with Optuna (extra "sweep") that chooses them.

`schedule` is a generator: it yields the parts of a stage, receives their outcomes, and decides what follows. It does
no work itself, so a sweep that starts again repeats its decisions from stored outcomes and continues where it ended.
All decisions are made when every part of a stage has ended: they do not depend on the order or the time of the runs.

The decision depends only on scores at that round, never on the time or the order in which runs were computed.

Nothing of Optuna is stored: a sweep that starts again tells a new study the same results in the same order, and the
sampler, with its fixed seed, chooses the same configurations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedplat import errors, extras
from fedplat.simulation.report.summary import mean_interval
from fedplat.sweep import plan


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

    configuration: plan.Configuration
    seed: int
    until: int

    @property
    def key(self) -> RunKey:
        """The run."""
        return RunKey(self.configuration.number, self.seed)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """A configuration and its outcomes by seed. `stopped_after` is the rung after which it was stopped, or 0."""

    configuration: plan.Configuration
    outcomes: Mapping[int, plan.Outcome]
    stopped_after: int = 0

    def score(self, objective: plan.Objective) -> float | None:
        """Return the mean score over seeds; None if a run has none."""
        return mean_score(self.outcomes.values(), objective, self.stopped_after)


ChooseBatch = Callable[[Sequence[Evaluated]], Sequence[plan.Configuration] | None]
"""Returns the next configurations, given all that were evaluated; None at the end."""
Outcomes = Mapping[RunKey, plan.Outcome]


def schedule(
    choose_batch: ChooseBatch, seeds: Sequence[int], objective: plan.Objective, stopping: plan.Stopping | None = None
) -> Generator[list[RunPart], Outcomes, list[Evaluated]]:
    """Yield the parts of each stage, and return all evaluated configurations, in the order of their numbers.

    The caller sends the outcomes of the parts, which may reach beyond their rung.
    """
    evaluated: list[Evaluated] = []
    earlier: dict[int, list[float]] = {}
    rungs = stopping.rounds if stopping is not None else []
    while (batch := choose_batch(evaluated)) is not None:
        found: dict[RunKey, plan.Outcome] = {}
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


def once(configurations: Sequence[plan.Configuration]) -> ChooseBatch:
    """Return the function that chooses all configurations in one batch."""
    return lambda evaluated: None if evaluated else configurations


def mean_score(outcomes: Iterable[plan.Outcome], objective: plan.Objective, until: int) -> float | None:
    """Return the mean score of runs up to a round (0: their end); None if one of them has no score."""
    scores = [outcome.score(objective, until) for outcome in outcomes]
    known = [score for score in scores if score is not None]
    return mean_interval(known).mean if known and len(known) == len(scores) else None


def _select(found: Outcomes, configuration: plan.Configuration, seeds: Sequence[int]) -> dict[int, plan.Outcome]:
    return {seed: found[RunKey(configuration.number, seed)] for seed in seeds}


def choose_stopped(stopping: plan.Stopping, scores: Mapping[int, float], earlier: Sequence[float] = ()) -> set[int]:
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
        case plan.SuccessiveHalving():
            # Rounded first: 0.7 * 10 is slightly more than 7 in floating point.
            return set(best_first[max(1, math.ceil(round(stopping.keep * len(scores), 9))) :])
        case plan.MedianStopping():
            known = [*earlier, *scores.values()]
            if len(known) < stopping.min_configurations:
                return set()
            median = statistics.median(known)
            return {number for number in best_first[1:] if scores[number] < median}


MAX_STARTUP = 10
"""The trials that the TPE sampler chooses at random before it uses results: Optuna's default, or half of all trials."""


class TrialChooser:
    """Chooses the next batch of configurations, see `ChooseBatch`. Raises `MissingExtraError` without Optuna.

    A configuration that was chosen before is not simulated again: Optuna is told its result.
    """

    def __init__(self, options: plan.SearchOptions, objective: plan.Objective) -> None:
        self._optuna = _import_optuna()
        self._options, self._objective = options, objective
        self._num_trials = 0
        self._waiting: list[tuple[Any, plan.Configuration]] = []
        self._known: dict[tuple[str, ...], plan.Configuration] = {}
        with _quiet(self._optuna):
            self._ranges = {key: self._convert(each) for key, each in options.parameters.items()}
            self._study = self._optuna.create_study(
                sampler=self._make_sampler(), direction="maximize" if objective.maximize else "minimize"
            )

    def __call__(self, evaluated: Sequence[Evaluated]) -> list[plan.Configuration] | None:
        """Tell the study the results of the last batch, and return the next one without repetitions."""
        with _quiet(self._optuna):
            self._tell({each.configuration.number: each for each in evaluated})
            if self._num_trials >= self._options.trials:
                return None
            for _ in range(min(self._options.batch, self._options.trials - self._num_trials)):
                self._num_trials += 1
                trial = self._study.ask(self._ranges)
                made = plan.Configuration(len(self._known) + 1, {key: trial.params[key] for key in self._ranges})
                configuration = self._known.setdefault(tuple(made.changes), made)
                self._waiting.append((trial, configuration))
        done = {each.configuration.number for each in evaluated}
        chosen = {each.number: each for _, each in self._waiting if each.number not in done}
        return list(chosen.values())

    def _tell(self, evaluated: Mapping[int, Evaluated]) -> None:
        state = self._optuna.trial.TrialState
        for trial, configuration in self._waiting:
            result = evaluated[configuration.number]
            score = result.score(self._objective)
            if score is None or score != score:
                self._study.tell(trial, state=state.FAIL)
            elif result.stopped_after:
                trial.report(score, result.stopped_after)
                self._study.tell(trial, state=state.PRUNED)
            else:
                self._study.tell(trial, score)
        self._waiting.clear()

    def _make_sampler(self) -> Any:
        if self._options.sampler == "random":
            return self._optuna.samplers.RandomSampler(seed=self._options.seed)
        # Trials of a batch count as bad ones while they run, so that a batch does not have the same values many times.
        startup = min(MAX_STARTUP, max(1, self._options.trials // 2))
        return self._optuna.samplers.TPESampler(seed=self._options.seed, n_startup_trials=startup, constant_liar=True)

    def _convert(self, each: plan.Range) -> Any:
        distributions = self._optuna.distributions
        match each:
            case plan.FloatRange():
                return distributions.FloatDistribution(each.low, each.high)
            case plan.LogRange():
                return distributions.FloatDistribution(each.low, each.high, log=True)
            case plan.IntegerRange():
                high = each.high - (each.high - each.low) % each.step
                return distributions.IntDistribution(each.low, high, step=each.step)
            case plan.Choices():
                return distributions.CategoricalDistribution(each.values)


def list_corners(options: plan.SearchOptions) -> list[plan.Configuration]:
    """Return configurations with the ends of the ranges and all choices, to check them before the search begins."""
    ends: dict[str, list[Any]] = {
        key: list(each.values) if isinstance(each, plan.Choices) else [each.low, each.high]
        for key, each in options.parameters.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    corners = [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]
    return [plan.Configuration(number, values) for number, values in enumerate(corners, 1)]


def _import_optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as exc:
        raise errors.MissingExtraError(
            f"a search needs Optuna; install it with: {extras.install_command('sweep')}, or use a grid"
        ) from exc
    return optuna


@contextlib.contextmanager
def _quiet(optuna: Any) -> Generator[None]:
    """Hide Optuna's log lines, and its warning that `constant_liar` is new."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
