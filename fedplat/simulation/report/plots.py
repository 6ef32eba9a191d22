"""Plots of a run (extra "plots"): accuracy, time, participation, staleness, secure aggregation, and the data.

Each function draws one figure. Nothing is shown on a screen, and pyplot's global state is not changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from fedplat import errors, extras, texts
from fedplat.simulation.data import Federation
from fedplat.simulation.recording.result import Group, Result
from fedplat.simulation.report.data import label_table
from fedplat.simulation.report.summary import MeanSeries, Summary, collect_federated, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAIN, SECOND, QUIET, BAD, SPARE = "#1f5f8b", "#d9822b", "#888888", "#a8324a", "#9db8cc"
COLORS = (MAIN, SECOND, BAD, "#3f8f5b", "#7b5ea7", "#8a6d3b", "#4aa5a8", QUIET)
"""The colors of lines in the order of their configurations."""
STYLES = ("-", "--", "-.", ":", (0, (5, 1)))
"""The styles of lines, so that lines on each other are told apart."""
MIN_BAND_SEEDS = 5
"""The fewest seeds whose interval is drawn as a band; of fewer, each seed is a thin line."""
MAX_ROWS = 200
"""The most clients in the plot of labels; of a larger fleet, this many evenly spaced clients are shown."""
_MAX_GROUPS = 24
_SAME_SHAPE = 0.05
"""If time is a straight line of rounds but for this part of its range, a plot over time would show nothing more."""
_PHASES = ("ADVERTISING", "SHARING", "COLLECTING", "CONFIRMING", "UNMASKING")


def draw(result: Result, summary: Summary, folder: Path, federation: Federation | None = None) -> list[Path]:
    """Draw the plots that the run has numbers for as PNG files. Raises `MissingExtraError` without matplotlib."""
    return [save(folder / f"{name}.png", draw) for name, draw in pictures(result, summary, federation).items()]


def pictures(result: Result, summary: Summary, federation: Federation | None) -> dict[str, Callable[[Figure], object]]:
    """Return the functions that draw the plots that the run has numbers for, by the plots' names."""
    found: dict[str, Callable[[Figure], object]] = {}
    if has_metric(result, summary):
        found["accuracy"] = lambda figure: draw_accuracy(figure, result, summary)
    if result.rounds:
        found["time"] = lambda figure: draw_time(figure, result)
    if result.participation.merged.any():
        found["participation"] = lambda figure: draw_participation(figure, result)
    if any(result.staleness):
        found["staleness"] = lambda figure: draw_staleness(figure, result)
    if result.secure_costs:
        found["secure"] = lambda figure: draw_secure(figure, result)
    if federation is not None:
        found["data"] = lambda figure: draw_data(figure, federation)
    return found


def has_metric(result: Result, summary: Summary) -> bool:
    """Return whether the metric of the summary was evaluated in any round."""
    return any(len(each(result.attempts, summary.metric).values) for each in (series, collect_federated))


def new_figure() -> Figure:
    """Return an empty figure, which notebooks show as a picture. Raises `MissingExtraError` without matplotlib."""
    try:
        from fedplat.simulation.report.figure import ShownFigure

        return ShownFigure(layout="constrained")
    except ModuleNotFoundError as exc:
        raise errors.MissingExtraError(
            f"plots need matplotlib; install it with: {extras.install_command('plots')}, or use --no-plots"
        ) from exc


def save(path: Path, picture: Callable[[Figure], object]) -> Path:
    """Draw one plot into a PNG file and return the path. Raises `MissingExtraError` without matplotlib."""
    figure = new_figure()
    picture(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def draw_accuracy(figure: Figure, result: Result, summary: Summary) -> None:
    """Plot the metric over rounds and over virtual time: on the central test data, and on clients' held-out data."""
    named = {"central test data": series(result.attempts, summary.metric)}
    named["clients' held-out data"] = collect_federated(result.attempts, summary.metric)
    lines = {name: line for name, line in named.items() if len(line.values)}
    panels = _panels(figure, [(line.rounds, line.at_s) for line in lines.values()], "virtual")
    for (name, line), color, style in zip(lines.items(), (MAIN, SECOND), STYLES, strict=False):
        marker = "o" if len(line.values) <= 40 else None
        for axis, steps in _steps(panels, line.rounds, line.at_s):
            axis.plot(steps, line.values, style, color=color, marker=marker, markersize=3, linewidth=1.5, label=name)
    if len(lines) > 1:
        _legend_above(panels[-1].axis, len(lines))
    _label_metric(panels, summary.metric, summary.target)
    if summary.best is not None:
        figure.suptitle(f"{result.job}: best {summary.metric} {summary.best.value:.4g} in round {summary.best.round}")


class MeanLine(NamedTuple):
    """The mean of a metric over seeds, and the metric of each seed in the same rounds."""

    mean: MeanSeries
    seeds: Sequence[npt.NDArray[np.float64]]


def draw_means(figure: Figure, lines: Mapping[str, MeanLine], metric: str, target: float, confidence: float) -> None:
    """Plot means by name, with their intervals or, of few seeds, with the lines of the seeds."""
    panels = _panels(figure, [(line.mean.rounds, line.mean.at_s) for line in lines.values()], "mean virtual")
    has_bands = all(len(line.seeds) >= MIN_BAND_SEEDS for line in lines.values())
    for number, (name, (mean, seeds)) in enumerate(lines.items()):
        color, style = COLORS[number % len(COLORS)], STYLES[number % len(STYLES)]
        # A label that begins with "_" would be left out of the legend, and text between "$" would be a formula.
        label = texts.shorten(name).lstrip("_").replace("$", r"\$")
        for axis, steps in _steps(panels, mean.rounds, mean.at_s):
            axis.plot(steps, mean.mean, color=color, linestyle=style, linewidth=1.8, label=label)
            if has_bands:
                axis.fill_between(steps, mean.low, mean.high, color=color, alpha=0.2, linewidth=0)
                continue
            for values in seeds if len(seeds) > 1 else ():
                axis.plot(steps, values, color=color, linewidth=0.7, alpha=0.4)
    _label_metric(panels, metric, target)
    handles, labels = panels[0].axis.get_legend_handles_labels()
    columns = min(4, len(lines))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="small")
    figure.suptitle(f"{metric}: {_describe_means(lines, has_bands, confidence)}")


def _describe_means(lines: Mapping[str, MeanLine], has_bands: bool, confidence: float) -> str:
    counts = [len(line.seeds) for line in lines.values()]
    if max(counts) == 1:
        return "one seed each"
    seeds = f"{min(counts)} seeds" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} seeds"
    interval = f"with {100 * confidence:g} % confidence intervals of the mean"
    return f"means of {seeds}, {interval if has_bands else 'thin lines are the seeds'}"


@dataclasses.dataclass(frozen=True)
class _Panel:
    """One of the axes of a figure: over rounds, or over virtual time in units of `seconds`."""

    axis: Axes
    seconds: float = 0.0


_Points = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]


def _panels(figure: Figure, lines: Sequence[_Points], time: str) -> list[_Panel]:
    """Make the axes for lines over (rounds, seconds): one, or two if those over time show other pictures."""
    rounds, at_s = (np.concatenate(each).astype(np.float64) for each in zip(*lines, strict=True))
    has_time = bool(_is_bent(rounds, at_s))
    figure.set_size_inches(10 if has_time else 7, 4)
    axes: Sequence[Axes] = figure.subplots(1, 1 + has_time, sharey=True, squeeze=False)[0]
    seconds, unit = _time_unit(float(at_s.max(initial=0.0)))
    for axis, label in zip(axes, ("round", f"{time} {unit}"), strict=False):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    _whole_numbers(axes[0])
    return [_Panel(axes[0]), *(_Panel(axis, seconds) for axis in axes[1:])]


def _is_bent(rounds: npt.NDArray[np.float64], at_s: npt.NDArray[np.float64]) -> bool:
    """Return whether the virtual time of any point is not on the straight line through the others."""
    if np.ptp(rounds) == 0.0:
        return False
    centered = rounds - rounds.mean()
    slope = float(centered @ at_s / (centered @ centered))
    return float(np.abs(at_s - at_s.mean() - slope * centered).max()) > _SAME_SHAPE * float(np.ptp(at_s))


def _steps(
    panels: Sequence[_Panel], rounds: npt.NDArray[np.float64], at_s: npt.NDArray[np.float64]
) -> list[tuple[Axes, npt.NDArray[np.float64]]]:
    return [(panel.axis, at_s / panel.seconds if panel.seconds else rounds) for panel in panels]


def _label_metric(panels: Sequence[_Panel], metric: str, target: float) -> None:
    first = panels[0].axis
    first.set_ylabel(f"{metric} on held-out data")
    if not target:
        return
    for panel in panels:
        panel.axis.axhline(target, linestyle="--", linewidth=1, color=QUIET)
    first.annotate(
        f"target {target:g}",
        (0, target),
        (4, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        color=QUIET,
        fontsize="small",
    )


def draw_time(figure: Figure, result: Result) -> None:
    """Plot the virtual time of each round, with its abandoned attempts, and its assignments by outcome."""
    rounds = result.rounds
    numbers = np.array([record.round for record in rounds])
    ends = np.array([record.ended_at for record in rounds])
    seconds, unit = _time_unit(float(np.diff(ends, prepend=0.0).max(initial=0.0)))
    figure.set_size_inches(10, 5)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    durations, collecting = (
        np.diff(ends, prepend=0.0),
        np.array([record.ended_at - record.collecting_at for record in rounds]),
    )
    top.plot(numbers, durations / seconds, color=MAIN, linewidth=1.2, label="since the previous round")
    if not np.allclose(durations, collecting, rtol=0.01):  # else one line would hide the other
        top.plot(numbers, collecting / seconds, "--", color=SECOND, linewidth=1.2, label="from the first assignment on")
    top.set_ylabel(f"virtual {unit}")
    top.set_ylim(bottom=0.0)
    figure.suptitle(
        f"{result.job}: {_duration(result.totals.duration_s)} for {texts.format_count(result.totals.rounds, 'round')}"
    )
    _legend_above(top, 2)
    shown = {"MERGED": MAIN, "LATE": SECOND, "FAILED": BAD, "SURPLUS": SPARE, "other": QUIET}
    counts = {name: np.array([record.counts.get(name, 0) for record in rounds]) for name in list(shown)[:-1]}
    counts["other"] = np.array([sum(record.counts.values()) for record in rounds]) - sum(counts.values())
    used = [name for name in shown if counts[name].any()]
    if used:
        bottom.stackplot(
            numbers,
            *(counts[name] for name in used),
            colors=[shown[name] for name in used],
            labels=[name.lower() for name in used],
            step="mid",
        )
        _legend_above(bottom, len(used))
    bottom.set_ylabel("assignments")
    bottom.set_xlabel("round")
    _whole_numbers(bottom)
    bottom.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)


def draw_participation(figure: Figure, result: Result) -> None:
    """Plot how evenly merged updates are distributed over clients, and which groups are over-represented."""
    groups = [group for group in result.groups if group.num_clients][:_MAX_GROUPS]
    figure.set_size_inches(10 if groups else 5.5, max(4.5, 0.26 * len(groups)))
    lorenz = figure.add_subplot(1, 2 if groups else 1, 1)
    merged = result.participation.merged
    shares = np.concatenate(([0.0], np.cumsum(np.sort(merged)))) / merged.sum()
    clients = np.linspace(0.0, 1.0, len(shares))
    lorenz.fill_between(clients, shares, clients, color=MAIN, alpha=0.15, linewidth=0)
    lorenz.plot(clients, shares, color=MAIN, linewidth=1.5)
    lorenz.plot([0, 1], [0, 1], color=QUIET, linestyle="--", linewidth=1)
    lorenz.set_xlabel("share of clients, those with the fewest first")
    lorenz.set_ylabel("share of merged updates")
    num_participants = int(np.count_nonzero(merged))
    lorenz.set_title(
        f"{num_participants:,} of {len(merged):,} clients have a merged update, Gini {gini(merged):.2f}",
        fontsize="medium",
    )
    lorenz.grid(alpha=0.3)
    if groups:
        _bars(figure.add_subplot(1, 2, 2), groups)
    figure.suptitle(result.job)


def _bars(axis: Axes, groups: Sequence[Group]) -> None:
    over = np.array([group.over for group in groups])
    colors = [MAIN if value >= 1.0 else SECOND for value in over]
    # Bars begin at 1, so that they show which groups have more than their share, and which have less.
    axis.barh(np.arange(len(groups)), over - 1.0, left=1.0, color=colors)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_yticks(np.arange(len(groups)), [_group_name(group.name) for group in groups], fontsize="small")
    axis.invert_yaxis()
    axis.set_xlabel("share of merged updates / share of the fleet")
    axis.set_title("over- and under-represented", fontsize="medium")
    axis.set_axisbelow(True)
    axis.grid(alpha=0.3, axis="x")


def _group_name(name: str) -> str:
    return {"speed 1/10": "slowest tenth", "speed 10/10": "fastest tenth"}.get(name, name)


def draw_staleness(figure: Figure, result: Result) -> None:
    """Plot the staleness of merged updates: the number of versions committed since their base version."""
    figure.set_size_inches(6, 4)
    axis = figure.subplots()
    ages, counts = np.array(list(result.staleness)), np.array(list(result.staleness.values()))
    axis.bar(ages, counts, width=0.9, color=MAIN)
    mean = float((ages * counts).sum() / counts.sum())
    axis.axvline(mean, color=SECOND, linestyle="--", linewidth=1.2, label=f"mean {mean:.2f}")
    _whole_numbers(axis)
    axis.set_xlabel("staleness (versions)")
    axis.set_ylabel("merged updates")
    axis.set_title(result.job)
    axis.legend()
    axis.set_axisbelow(True)
    axis.grid(alpha=0.3, axis="y")


def draw_secure(figure: Figure, result: Result) -> None:
    """Plot what secure aggregation costs in each attempt: a client's bytes, seconds of a core, and drop-outs."""
    costs = [each for _, each in result.secure_costs]
    numbers, marker = np.arange(1, len(costs) + 1), "o" if len(costs) <= 40 else None
    figure.set_size_inches(10, 6)
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    top.plot(numbers, [each.bytes_up / 1e6 for each in costs], color=MAIN, marker=marker, label="up")
    top.plot(numbers, [each.bytes_down / 1e6 for each in costs], color=SECOND, marker=marker, label="down")
    top.set_ylabel("MB of a client")
    middle.plot(numbers, [each.client_s for each in costs], color=MAIN, marker=marker, label="of a client")
    middle.plot(numbers, [each.server_s for each in costs], color=SECOND, marker=marker, label="of the server")
    middle.set_ylabel("seconds of a core")
    lost = {phase: np.array([each.dropped.get(phase, 0) for each in costs]) for phase in _PHASES}
    below = np.zeros(len(costs))
    for (phase, counts), color in zip(lost.items(), COLORS, strict=False):
        bottom.bar(numbers, counts, width=0.8, bottom=below, color=color, label=phase.lower())
        below += counts
    bottom.set_xlim(0.4, len(costs) + 0.6)
    bottom.set_ylabel("drop-outs")
    bottom.set_xlabel("attempt")
    for axis, num_columns in ((top, 2), (middle, 2), (bottom, len(lost))):
        _legend_above(axis, num_columns)
        axis.set_ylim(bottom=0.0)
        axis.grid(alpha=0.3)
    _whole_numbers(bottom)
    figure.suptitle(f"{result.job}: secure aggregation")


def draw_data(figure: Figure, federation: Federation) -> None:
    """Plot the sizes of clients' data and, if there are labels, the shares of labels of each client."""
    sizes = federation.sizes()
    table = label_table(federation)
    has_labels = table.shape[1] > 1
    figure.set_size_inches(10 if has_labels else 5.5, 5)
    histogram = figure.add_subplot(1, 2 if has_labels else 1, 1)
    histogram.bar(np.arange(len(sizes)), np.sort(sizes)[::-1], width=1.0, color=MAIN)
    histogram.set_xlabel("clients, the largest first")
    histogram.set_ylabel("examples")
    histogram.set_title(
        f"{len(sizes):,} clients, {sizes.min():,} to {sizes.max():,} examples, median {np.median(sizes):,.0f}",
        fontsize="medium",
    )
    histogram.grid(alpha=0.3, axis="y")
    if not has_labels:
        return
    axis = figure.add_subplot(1, 2, 2)
    rows = np.unique(np.linspace(0, len(table) - 1, min(len(table), MAX_ROWS)).astype(np.int64))
    shares = table[rows] / table[rows].sum(axis=1, keepdims=True)
    image = axis.imshow(shares, aspect="auto", cmap="Blues", vmin=0.0, interpolation="nearest")
    figure.colorbar(image, ax=axis, label="share of the client's examples")
    axis.set_xlabel("label")
    axis.set_ylabel("client" if len(rows) == len(table) else f"{len(rows)} of {len(table):,} clients, evenly spaced")
    ticks = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), 11)).astype(np.int64))
    axis.set_yticks(ticks, [f"{rows[tick]}" for tick in ticks])
    _whole_numbers(axis)
    axis.set_title("labels", fontsize="medium")


def gini(counts: npt.NDArray[np.int64]) -> float:
    """Return the Gini coefficient of counts: 0 if all are equal, towards 1 if one client has everything."""
    ordered, total = np.sort(counts).astype(np.float64), float(counts.sum())
    if not total:
        return 0.0
    ranks = np.arange(1, len(ordered) + 1)
    return float((2 * ranks - len(ordered) - 1) @ ordered / (len(ordered) * total))


def _whole_numbers(axis: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend_above(axis: Axes, num_columns: int) -> None:
    """Draw the legend above the plot, where it cannot hide lines or bars."""
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=num_columns, frameon=False, fontsize="small")


def _time_unit(longest_s: float) -> tuple[float, str]:
    for seconds, unit in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if longest_s >= 2 * seconds:
            return seconds, unit
    return 1.0, "seconds"


def _duration(seconds: float) -> str:
    size, unit = _time_unit(seconds)
    return f"{seconds / size:.3g} virtual {unit}"
