"""The records of a sweep file, the configurations that follow, and what a sweep needs of the result of a run.

>>> options = SweepOptions(base="a.toml", grid={"config.epochs": [1, 2]}, zip={"rounds": [5, 9], "name": ["a", "b"]})
>>> [configuration.values for configuration in expand(options)][:2]
[{'rounds': 5, 'name': 'a', 'config.epochs': 1}, {'rounds': 5, 'name': 'a', 'config.epochs': 2}]
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct

from fedplat.config.toml_text import format_toml
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report.summary import Series, collect_federated, find_crossing, series


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Values of keys of the base file; `number` counts the configurations of a sweep from 1."""

    number: int
    values: Mapping[str, Any]

    @property
    def changes(self) -> list[str]:
        """The values as `key=value` texts, the arguments of `fedplat simulate --set`."""
        return [f"{key}={format_toml(value)}" for key, value in self.values.items()]


def keys(options: SweepOptions) -> list[str]:
    """Return the keys of the base file that differ between configurations, in the order of the tables."""
    if options.search is not None:
        return list(options.search.parameters)
    return [*(options.points[0] if options.points else ()), *options.zip, *options.grid]


def num_configurations(options: SweepOptions) -> int:
    """Return the number of configurations; of a search, the number of trials."""
    if options.search is not None:
        return options.search.trials
    zipped = len(next(iter(options.zip.values()))) if options.zip else 1
    return (len(options.points) or 1) * zipped * math.prod(len(values) for values in options.grid.values())


def expand(options: SweepOptions) -> list[Configuration]:
    """Return all configurations of a sweep without a search; the last key of the grid varies fastest."""
    points = options.points or [{}]
    zipped = [dict(zip(options.zip, row, strict=True)) for row in zip(*options.zip.values(), strict=True)] or [{}]
    grid = [dict(zip(options.grid, row, strict=True)) for row in itertools.product(*options.grid.values())]
    products = itertools.product(points, zipped, grid)
    return [Configuration(number, {**a, **b, **c}) for number, (a, b, c) in enumerate(products, 1)]


def find_duplicate(configurations: Sequence[Configuration]) -> Configuration | None:
    """Return the first configuration with the values of an earlier one; None if all differ."""
    seen: set[tuple[str, ...]] = set()
    for configuration in configurations:
        if (values := tuple(configuration.changes)) in seen:
            return configuration
        seen.add(values)
    return None


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or the whole key if several end alike.

    >>> short_names(["config.mu", "aggregation.learning_rate", "config.learning_rate"])["config.mu"]
    'mu'
    """
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def describe(values: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """Return values in one line, such as `learning_rate=0.1, epochs=2`."""
    return ", ".join(f"{names[key]}={format_toml(value)}" for key, value in values.items())


MAX_KEYS = 20
MAX_VALUES = 1000
MAX_RUNS = 100_000

Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Values = Annotated[list[Any], Meta(min_length=1, max_length=MAX_VALUES)]
Bound = Annotated[float, Meta(ge=-1e30, le=1e30)]
Rungs = Annotated[list[Count], Meta(min_length=1, max_length=100)]


class FloatRange(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="float"):
    """Numbers between `low` and `high`."""

    low: Bound
    high: Bound

    def __post_init__(self) -> None:
        _check_order(self.low, self.high)


class LogRange(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="log"):
    """Numbers between `low` and `high`, both above 0, whose logarithms are sampled."""

    low: Annotated[float, Meta(gt=0.0, le=1e30)]
    high: Annotated[float, Meta(gt=0.0, le=1e30)]

    def __post_init__(self) -> None:
        _check_order(self.low, self.high)


class IntegerRange(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="int"):
    """Whole numbers `low`, `low + step` and so on, up to `high`."""

    low: Annotated[int, Meta(ge=-(2**53), le=2**53)]
    high: Annotated[int, Meta(ge=-(2**53), le=2**53)]
    step: Count = 1

    def __post_init__(self) -> None:
        _check_order(self.low, self.high)


class Choices(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="categorical"):
    """One of `values`, which have no order."""

    values: Annotated[list[str | int | float | bool], Meta(min_length=1, max_length=MAX_VALUES)]


Range = FloatRange | LogRange | IntegerRange | Choices


class SearchOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """The table `[search]`: configurations that Optuna chooses, given the results of earlier ones.

    `batch` configurations are chosen at a time, so at most `batch` × seeds runs are computed in parallel; the choice
    depends on this number and never on the number of processes. `seed` determines the sampler's random numbers.
    """

    trials: Annotated[int, Meta(ge=1, le=10_000)]
    parameters: dict[str, Range]
    batch: Annotated[int, Meta(ge=1, le=1000)] = 4
    sampler: Literal["tpe", "random"] = "tpe"
    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0


class MedianStopping(Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="median"):
    """After each of `rounds`, stop configurations that are worse than the median of all that have reached this round.

    No configuration is stopped before `min_configurations` have reached the round. This is the median rule of Golovin
    et al. 2017 (Google Vizier, section 3.2.2), with the score at that round.
    """

    rounds: Rungs
    min_configurations: Annotated[int, Meta(ge=2, le=MAX_RUNS)] = 3

    def __post_init__(self) -> None:
        _check_rungs(self.rounds)


class SuccessiveHalving(Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="halving"):
    """After each of `rounds`, continue with the best fraction `keep` of the configurations, rounded up.

    Jamieson and Talwalkar 2016, algorithm 1, with explicit rounds. In a search the rule applies to each batch.
    """

    rounds: Rungs
    keep: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.5

    def __post_init__(self) -> None:
        _check_rungs(self.rounds)


Stopping = MedianStopping | SuccessiveHalving


class SweepOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """A sweep file. Keys of the base file are dotted, as in `fedplat simulate --set`.

    The configurations are the product of `points` (explicit configurations), `zip` (lists of equal length, whose
    elements belong together) and `grid` (all combinations), or they come from `search`. Each is simulated with all
    `seeds` (by default that of the base file). `metric` is by default the base file's `simulation.target_metric`;
    "virtual_s" stands for the virtual seconds of the job. A run's score is the metric's `last` or `best` value.
    """

    base: Annotated[str, Meta(min_length=1, max_length=4096)]
    seeds: Annotated[list[Seed], Meta(max_length=MAX_VALUES)] = []
    metric: Annotated[str, Meta(max_length=200)] = ""
    direction: Literal["", "maximize", "minimize"] = ""
    score: Literal["last", "best"] = "last"
    max_runs: Annotated[int, Meta(ge=1, le=MAX_RUNS)] = 1000
    grid: dict[str, Values] = {}
    zip: dict[str, Values] = {}
    points: Annotated[list[dict[str, Any]], Meta(max_length=MAX_VALUES)] = []
    search: SearchOptions | None = None
    stopping: Stopping | None = None

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: expected each seed once")
        lengths = {key: len(values) for key, values in self.zip.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f'"{key}" has {length}' for key, length in lengths.items())
            raise ValueError(f"zip: expected lists of equal length; {found}")
        named = [*self.grid, *self.zip, *{key for point in self.points for key in point}]
        if self.search is not None:
            if named or self.points:
                raise ValueError(
                    "search: expected no grid, zip or points beside it; make their values parameters of the kind "
                    '"categorical"'
                )
            named = list(self.search.parameters)
        if not named:
            raise ValueError("grid: missing; expected a table [grid], [zip] or [search], or tables [[points]]")
        if len(named) > MAX_KEYS:
            raise ValueError(f"grid: {len(named)} keys differ between configurations; expected at most {MAX_KEYS}")
        if twice := sorted({key for key in named if named.count(key) > 1}):
            raise ValueError(f'grid: "{twice[0]}" is also in another table; expected each key in one of them')
        if any(point.keys() != self.points[0].keys() for point in self.points):
            raise ValueError("points: expected the same keys in each point")
        if "simulation.seed" in named:
            raise ValueError('grid: "simulation.seed": expected the seeds in the list `seeds`')


def _check_order(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"low = {low:g}: expected a number below high = {high:g}")


def _check_rungs(rounds: list[int]) -> None:
    if any(later <= earlier for earlier, later in itertools.pairwise(rounds)):
        raise ValueError(f"rounds = {rounds}: expected rounds in ascending order, each once")


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
