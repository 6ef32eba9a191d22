"""A search with Optuna (extra "sweep"): it chooses configurations in batches, given the results of earlier batches.

Nothing of Optuna is stored: a sweep that starts again tells a new study the same results in the same order, and the
sampler, with its fixed seed, chooses the same configurations.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from fedplat import errors, extras
from fedplat.sweep import outcome, schedule
from fedplat.sweep.plan import Choices, Configuration, FloatRange, IntegerRange, LogRange, Range, SearchOptions

MAX_STARTUP = 10
"""The trials that the TPE sampler chooses at random before it uses results: Optuna's default, or half of all trials."""


class TrialChooser:
    """Chooses the next batch of configurations, see `schedule.ChooseBatch`. Raises `MissingExtraError` without Optuna.

    A configuration that was chosen before is not simulated again: Optuna is told its result.
    """

    def __init__(self, options: SearchOptions, objective: outcome.Objective) -> None:
        self._optuna = _import_optuna()
        self._options, self._objective = options, objective
        self._num_trials = 0
        self._waiting: list[tuple[Any, Configuration]] = []
        self._known: dict[tuple[str, ...], Configuration] = {}
        with _quiet(self._optuna):
            self._ranges = {key: self._convert(each) for key, each in options.parameters.items()}
            self._study = self._optuna.create_study(
                sampler=self._make_sampler(), direction="maximize" if objective.maximize else "minimize"
            )

    def __call__(self, evaluated: Sequence[schedule.Evaluated]) -> list[Configuration] | None:
        """Tell the study the results of the last batch, and return the next one without repetitions."""
        with _quiet(self._optuna):
            self._tell({each.configuration.number: each for each in evaluated})
            if self._num_trials >= self._options.trials:
                return None
            for _ in range(min(self._options.batch, self._options.trials - self._num_trials)):
                self._num_trials += 1
                trial = self._study.ask(self._ranges)
                made = Configuration(len(self._known) + 1, {key: trial.params[key] for key in self._ranges})
                configuration = self._known.setdefault(tuple(made.changes), made)
                self._waiting.append((trial, configuration))
        done = {each.configuration.number for each in evaluated}
        chosen = {each.number: each for _, each in self._waiting if each.number not in done}
        return list(chosen.values())

    def _tell(self, evaluated: Mapping[int, schedule.Evaluated]) -> None:
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

    def _convert(self, each: Range) -> Any:
        distributions = self._optuna.distributions
        match each:
            case FloatRange():
                return distributions.FloatDistribution(each.low, each.high)
            case LogRange():
                return distributions.FloatDistribution(each.low, each.high, log=True)
            case IntegerRange():
                high = each.high - (each.high - each.low) % each.step
                return distributions.IntDistribution(each.low, high, step=each.step)
            case Choices():
                return distributions.CategoricalDistribution(each.values)


def list_corners(options: SearchOptions) -> list[Configuration]:
    """Return configurations with the ends of the ranges and all choices, to check them before the search begins."""
    ends: dict[str, list[Any]] = {
        key: list(each.values) if isinstance(each, Choices) else [each.low, each.high]
        for key, each in options.parameters.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    corners = [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]
    return [Configuration(number, values) for number, values in enumerate(corners, 1)]


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
