"""A plot of the results (extra "plots"): busbw over size, with one panel for each collective."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from fedplat.pytorch.distributed.bench.records import FACTORS, BenchReport
from fedplat.simulation.report import plots
from fedplat_server.cli.bench import sizes, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (plots.MAIN, plots.QUIET, plots.SPARE, plots.SECOND, plots.BAD)
"""The colours of the implementations, in their order."""
_COLUMNS = 4


def save(report: BenchReport, path: Path) -> None:
    """Write the plot to a PNG file. Raises `MissingExtraError` without matplotlib."""
    plots.save(path, lambda figure: draw(figure, report))


def draw(figure: Figure, report: BenchReport) -> None:
    """Draw one panel for each collective; all panels share two logarithmic axes."""
    measured = {measurement.collective for measurement in report.measurements}
    collectives = [name for name in FACTORS if name in measured]
    columns = min(_COLUMNS, len(collectives))
    rows = -(-len(collectives) // columns)
    figure.set_size_inches(2.6 * columns + 0.6, 2.3 * rows + 0.9)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for number, axis in enumerate(axes.flat):
        if number < len(collectives):
            _draw_panel(axis, report, collectives[number])
        else:
            axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("busbw, GB/s")
    handles = {line.get_label(): line for axis in axes.flat for line in axis.get_lines()}
    names = [name for name in handles if not str(name).startswith("_")]
    figure.legend([handles[name] for name in names], names, loc="outside upper center", ncols=len(names), frameon=False)


def _draw_panel(axis: Axes, report: BenchReport, collective: str) -> None:
    for colour, implementation in zip(COLOURS, tables.list_implementations(report), strict=False):
        points = sorted(
            (each.size, each.busbw)
            for each in report.measurements
            if (each.collective, each.implementation) == (collective, implementation) and each.is_correct
        )
        if points:
            x, y = zip(*points, strict=True)
            name = tables.name_of(implementation, report)
            axis.plot(x, y, color=colour, label=name, linewidth=1.5, marker="o", markersize=2.5)
    for value, style, name in ((statistics.median(report.copies), "--", "memory copy"), (report.tcp, ":", "plain TCP")):
        axis.axhline(value, color="black", linestyle=style, linewidth=0.8, label=name)
    axis.set_title(collective, fontsize=10)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    every = sorted({each.size for each in report.measurements})
    shown = every if len(every) <= 4 else every[:: -(-len(every) // 4)]
    axis.set_xticks(shown, [sizes.format_size(size) for size in shown], fontsize=7)
    axis.minorticks_off()
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
