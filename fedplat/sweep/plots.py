"""Plots of a sweep (extra "plots"): the metric by round for each configuration, and by the values of two keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedplat import texts
from fedplat.config.toml_text import format_toml
from fedplat.simulation.report.plots import MAIN, MIN_BAND_SEEDS, QUIET, STYLES, save
from fedplat.sweep import plan, table
from fedplat.sweep.file import SweepFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLORED = 8
"""The best configurations have colors and a legend, others are gray."""
COLORS = (MAIN, "#d9822b", "#3a8a5f", "#a8324a", "#7a5aa6", "#8a6d3b", "#4aa3c7", "#c76aa0")
_MAX_CELLS = 400
_MAX_LABEL = 60


def draw(file: SweepFile, rows: Sequence[table.SweepRow], folder: Path) -> list[Path]:
    """Draw the plots that the sweep has numbers for as PNG files. Raises `MissingExtraError` without matplotlib."""
    pictures: dict[str, Callable[[Figure], object]] = {}
    if any(row.curve.rounds for row in rows):
        pictures["curves"] = lambda figure: draw_curves(figure, file, rows)
    if is_grid(file, rows):
        pictures["heatmap"] = lambda figure: draw_heatmap(figure, file, rows)
    return [save(folder / f"{name}.png", picture) for name, picture in pictures.items()]


def draw_curves(figure: Figure, file: SweepFile, rows: Sequence[table.SweepRow]) -> None:
    """Plot the mean of the metric over seeds by round for each configuration; from five seeds on, with its interval."""
    from matplotlib.ticker import MaxNLocator

    names, objective, has_bands = file.names, file.objective, len(file.seeds) >= MIN_BAND_SEEDS
    rows = [row for row in rows if row.curve.rounds]
    figure.set_size_inches(10, 5)
    axis: Axes = figure.subplots()
    for row in reversed(rows[NUM_COLORED:]):
        axis.plot(row.curve.rounds, _floats(row.curve.mean), color=QUIET, alpha=0.4, linewidth=0.8)
    for row, color, style in reversed(list(zip(rows, COLORS, itertools.cycle(STYLES), strict=False))):
        label = plan.describe(row.values, names)
        label = label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"
        label += f" (stopped after {row.stopped_after})" if row.stopped_after else ""
        marker = "o" if len(row.curve.rounds) <= 40 else None
        mean = _floats(row.curve.mean)
        axis.plot(
            row.curve.rounds,
            mean,
            color=color,
            linestyle=style,
            linewidth=1.6,
            marker=marker,
            markersize=3,
            label=label,
        )
        if has_bands:
            low, high = _floats(row.curve.low), _floats(row.curve.high)
            axis.fill_between(row.curve.rounds, low, high, color=color, alpha=0.1, linewidth=0)
    # Intervals may be far wider than the differences between configurations.
    means = np.concatenate([_floats(row.curve.mean) for row in rows])
    if (finite := means[np.isfinite(means)]).size:
        margin = 0.08 * float(np.ptp(finite)) or 0.01
        axis.set_ylim(float(finite.min()) - margin, float(finite.max()) + margin)
    if objective.target:
        axis.axhline(objective.target, linestyle="--", linewidth=1, color=QUIET)
    axis.set_xlabel("round")
    axis.set_ylabel(objective.metric)
    axis.grid(alpha=0.3)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = axis.get_legend_handles_labels()
    title = f"mean of {_seeds(file)}" + (", 95 % interval" if has_bands else "")
    title += f", the best {NUM_COLORED} of {len(rows)}" if len(rows) > NUM_COLORED else ""
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize="small", title=title)
    figure.suptitle(file.path.stem)


def is_grid(file: SweepFile, rows: Sequence[table.SweepRow]) -> bool:
    """Return whether the configurations are all combinations of the values of two keys."""
    axes = _axes(file, rows)
    if len(axes) != 2 or min(map(len, axes)) < 2:
        return False
    count = len(axes[0]) * len(axes[1])
    return count <= _MAX_CELLS and count == len(rows) and any(row.score is not None for row in rows)


def draw_heatmap(figure: Figure, file: SweepFile, rows: Sequence[table.SweepRow]) -> None:
    """Plot the mean score by the values of the two keys; configurations that were stopped early are marked."""
    keys, (down, across) = plan.keys(file.options), _axes(file, rows)
    cells: dict[tuple[int, int], table.SweepRow] = {}
    scores = np.full((len(down), len(across)), np.nan)
    for row in rows:
        at = tuple(values.index(format_toml(row.values[key])) for key, values in zip(keys, (down, across), strict=True))
        cells[at[0], at[1]] = row
        scores[at] = np.nan if row.score is None else row.score
    figure.set_size_inches(max(5.0, 1.1 * len(across) + 2.5), max(3.5, 0.6 * len(down) + 1.8))
    axis: Axes = figure.subplots()
    is_rising = file.objective.maximize
    image = axis.imshow(np.ma.masked_invalid(scores), aspect="auto", cmap="viridis" if is_rising else "viridis_r")
    figure.colorbar(image, ax=axis, label=f"{file.objective.metric}, mean of {_seeds(file)}")
    for (first, second), row in cells.items():
        text = "-" if row.score is None else f"{row.score:.3g}"
        text += f"\nafter {row.stopped_after}" if row.stopped_after else ""
        shade = 1.0 if row.score is None else _position(row.score, scores)
        is_light = (shade if is_rising else 1.0 - shade) > 0.6 or row.score is None
        axis.text(
            second, first, text, ha="center", va="center", fontsize="small", color="black" if is_light else "white"
        )
    axis.set_yticks(range(len(down)), down)
    axis.set_xticks(range(len(across)), across)
    axis.set_ylabel(file.names[keys[0]])
    axis.set_xlabel(file.names[keys[1]])
    mark = "; “after N”: stopped early, after round N" if any(row.stopped_after for row in rows) else ""
    axis.set_title(file.path.stem + mark, fontsize="medium")


def _axes(file: SweepFile, rows: Sequence[table.SweepRow]) -> list[list[str]]:
    """Return the distinct values of each key, in the order of the configurations."""
    ordered = sorted(rows, key=lambda row: row.number)
    return [list(dict.fromkeys(format_toml(row.values[key]) for row in ordered)) for key in plan.keys(file.options)]


def _position(score: float, scores: Any) -> float:
    """Return where a score is between the smallest one, 0, and the largest one, 1."""
    low, high = np.nanmin(scores), np.nanmax(scores)
    return float((score - low) / (high - low)) if high > low else 0.0


def _seeds(file: SweepFile) -> str:
    return texts.format_count(len(file.seeds), "seed")


def _floats(values: Sequence[float | None]) -> Any:
    return np.array([np.nan if value is None else value for value in values])
