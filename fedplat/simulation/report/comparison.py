"""Several configurations, each simulated with several seeds: means over the seeds, with confidence intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from fedplat import metrics, texts
from fedplat.simulation.recording.folder import finite
from fedplat.simulation.recording.result import Result
from fedplat.simulation.report import notebook, plots, summary
from fedplat.simulation.report.notebook import to_frame
from fedplat.simulation.report.summary import CONFIDENCE, Floats, MeanInterval, MeanSeries, mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


_AFTER_START = 0.0, math.inf
"""The possible numbers of rounds and seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRuns:
    """The runs of one configuration: `last`, `best` and `curve` are means over the seeds.

    `by_seed` has the metric of each seed in the rounds of `curve`. `num_reached` is the number of seeds whose run
    reached the target; `rounds_to_target` and `seconds_to_target` are means over these runs, None without such a run.
    """

    name: str
    seeds: tuple[int, ...]
    last: MeanInterval
    best: MeanInterval
    curve: MeanSeries
    by_seed: tuple[Floats, ...] = ()
    num_reached: int = 0
    rounds_to_target: MeanInterval | None = None
    seconds_to_target: MeanInterval | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Comparison:
    """Configurations by a metric on held-out data, with confidence intervals over their seeds.

    The intervals describe the seeds that were simulated: they need at least two for each configuration, and with few
    they are wide. `target` is 0 without a target.
    """

    metric: str
    target: float
    confidence: float
    configurations: tuple[ComparedRuns, ...]

    def __getitem__(self, name: str) -> ComparedRuns:
        """Return the configuration with a name."""
        for each in self.configurations:
            if each.name == name:
                return each
        raise KeyError(f"{name!r}: expected one of {', '.join(each.name for each in self.configurations)}")

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, for JSON; those that are unknown are None."""
        numbers = {
            "metric": self.metric,
            "target": self.target,
            "confidence": self.confidence,
            "configurations": [_to_dict(each) for each in self.configurations],
        }
        return finite(numbers)

    def to_pandas(self) -> DataFrame:
        """Return one row for each configuration and evaluated round. Raises `MissingExtraError` without pandas."""
        rows: list[dict[str, Any]] = []
        for each in self.configurations:
            arrays = msgspec.structs.asdict(each.curve)
            for number, round_number in enumerate(each.curve.rounds.astype(int).tolist()):
                numbers = {key: float(values[number]) for key, values in arrays.items() if key != "rounds"}
                rows.append({"configuration": each.name, "round": round_number} | numbers)
        return to_frame(rows)

    def plot(self) -> Figure:
        """Return a plot of the means, with their intervals or, of few seeds, with the line of each.

        Raises `MissingExtraError` without matplotlib.
        """
        figure = plots.new_figure()
        self._draw(figure)
        return figure

    def _draw(self, figure: Figure) -> None:
        lines = {each.name: plots.MeanLine(each.curve, each.by_seed) for each in self.configurations}
        plots.draw_means(figure, lines, self.metric, self.target, self.confidence)

    def __repr__(self) -> str:
        header, *rows = [self._header(), *self._rows()]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
        )
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        picture = notebook.format_picture(self._draw, f"{self.metric} by round")
        return f"<div>{notebook.format_table(self._rows(), self._header())}{picture}</div>"

    def _header(self) -> tuple[str, ...]:
        header = ("configuration", "seeds", f"last {self.metric}", f"best {self.metric}")
        return (*header, f"rounds to {self.target:g}", "virtual time") if self.target else header

    def _rows(self) -> list[tuple[str, ...]]:
        return [self._row(each) for each in self.configurations]

    def _row(self, each: ComparedRuns) -> tuple[str, ...]:
        row = (each.name, str(len(each.seeds)), str(each.last), str(each.best))
        if not self.target:
            return row
        if each.rounds_to_target is None or each.seconds_to_target is None:
            return (*row, "not reached", "-")
        part = "" if each.num_reached == len(each.seeds) else f" ({each.num_reached} of {len(each.seeds)} seeds)"
        return (*row, f"{each.rounds_to_target}{part}", texts.duration(each.seconds_to_target.mean))


def compare_results(
    results: Mapping[str, Sequence[Result]], metric: str, target: float = 0.0, confidence: float = CONFIDENCE
) -> Comparison:
    """Compare configurations, by their names, each with the results of several seeds.

    Raises `ValueError` for a configuration without results, with the same seed twice, or with a run that has no value
    of the metric.
    """
    if not results:
        raise ValueError("there are no configurations to compare; expected at least one, such as {'FedAvg': runs}")
    compared = tuple(_compare(name, runs, metric, target, confidence) for name, runs in results.items())
    return Comparison(metric=metric, target=target, confidence=confidence, configurations=compared)


def _compare(name: str, results: Sequence[Result], metric: str, target: float, confidence: float) -> ComparedRuns:
    if not results:
        raise ValueError(f"{name}: it has no runs; expected one for each seed")
    seeds = tuple(result.seed for result in results)
    if len(set(seeds)) < len(seeds):
        twice = next(seed for seed in seeds if seeds.count(seed) > 1)
        raise ValueError(f"{name}: the seed {twice} occurs twice; expected independent runs, each with another seed")
    lines = [summary.series(result.attempts, metric) for result in results]
    for seed, line in zip(seeds, lines, strict=True):
        if not len(line.values):
            raise ValueError(f"{name}: the run with seed {seed} has no {metric} on held-out data")
    summaries = [summary.summarize(result, metric, target) for result in results]
    bounds = metrics.find_range(metric, (value for line in lines for value in line.values.tolist()))
    rounds = [each.rounds_to_target for each in summaries if each.rounds_to_target is not None]
    seconds = [each.seconds_to_target for each in summaries if each.seconds_to_target is not None]
    return ComparedRuns(
        name=name,
        seeds=seeds,
        last=mean_interval((each.last.value for each in summaries if each.last is not None), confidence, bounds),
        best=mean_interval((each.best.value for each in summaries if each.best is not None), confidence, bounds),
        curve=_mean_series(lines, confidence, bounds),
        by_seed=tuple(_common_rounds(lines, "values")),
        num_reached=len(rounds),
        rounds_to_target=mean_interval(rounds, confidence, _AFTER_START) if rounds else None,
        seconds_to_target=mean_interval(seconds, confidence, _AFTER_START) if seconds else None,
    )


def _mean_series(lines: Sequence[summary.Series], confidence: float, bounds: tuple[float, float]) -> MeanSeries:
    (rounds, *_), at_s, values = (_common_rounds(lines, name) for name in ("rounds", "at_s", "values"))
    intervals = [mean_interval(column, confidence, bounds) for column in values.T.tolist()]
    low, mean, high = (
        np.array([np.nan if end is None else end for end in ends], np.float64)
        for ends in zip(*((each.low, each.mean, each.high) for each in intervals), strict=True)
    )
    return MeanSeries(rounds=rounds, at_s=at_s.mean(axis=0), mean=mean, low=low, high=high)


def _common_rounds(lines: Sequence[summary.Series], name: str) -> Floats:
    """Return numbers of the rounds that all runs have evaluated, [runs, rounds]."""
    common = sorted(set.intersection(*(set(line.rounds.tolist()) for line in lines)))
    return np.array([getattr(line, name)[np.isin(line.rounds, common)] for line in lines])


def _to_dict(each: ComparedRuns) -> dict[str, Any]:
    numbers = {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
    curve = {key: values.tolist() for key, values in msgspec.structs.asdict(each.curve).items()}
    by_seed = [values.tolist() for values in each.by_seed]
    return msgspec.to_builtins(numbers | {"curve": None, "by_seed": by_seed}) | {"curve": curve}
