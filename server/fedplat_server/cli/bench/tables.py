"""The results of a measurement as a table, as text, and as a plot (extra "plots")."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from fedplat.pytorch.distributed.bench.records import FACTORS, LIBRARY, BenchReport, Measurement
from fedplat.simulation.report import plots
from fedplat_server.cli.bench import sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def list_implementations(report: BenchReport) -> list[str]:
    """Return the implementations in a report; that of the library is the first."""
    return list(dict.fromkeys(each.implementation for each in report.measurements))


def name_of(implementation: str, report: BenchReport) -> str:
    """Return the display name of an implementation."""
    return {"gloo": "Gloo", "nccl": "NCCL"}[report.library] if implementation == LIBRARY else implementation


def make_table(report: BenchReport) -> Table:
    """Return a row for each collective and size: the library's time and algbw, and the busbw of all implementations."""
    names = list_implementations(report)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("collective", no_wrap=True)
    library = name_of(LIBRARY, report)
    for title in ("size", f"{library} time", "algbw", *(f"busbw {name_of(name, report)}" for name in names)):
        table.add_column(title, justify="right")
    for collective in FACTORS:
        rows = _group_rows([each for each in report.measurements if each.collective == collective])
        for number, row in enumerate(rows):
            title = collective if number == 0 else ""
            table.add_row(title, *_make_cells(row, names), end_section=number == len(rows) - 1)
    return table


def summarize(report: BenchReport) -> list[str]:
    """Return lines with the conditions of the measurement and reference bandwidths for the collectives."""
    lines = [
        f"{report.ranks} ranks on {report.device}, {report.cores} CPU cores, load {report.load:.1f} before it began; "
        "medians, in GB/s (10^9 bytes a second)",
        "memory copied by all ranks at once: " + ", ".join(f"{each:.2f}" for each in report.copies) + " GB/s a rank",
    ]
    if report.links:
        bandwidths = [link.bandwidth for link in report.links]
        slowest = min(report.links, key=lambda link: link.bandwidth)
        lines.append(
            f"links between two ranks: median {statistics.median(bandwidths):.2f}, "
            f"slowest {slowest.bandwidth:.2f} GB/s (rank {slowest.sender} to {slowest.receiver})"
        )
    lines.append(f"a plain TCP stream over the loopback: {report.tcp:.2f} GB/s")
    if report.load > report.cores / 2:
        lines.append("other programs kept the host busy: measure again when it is idle")
    return lines


def _group_rows(measurements: Sequence[Measurement]) -> list[dict[str, Measurement]]:
    rows: dict[int, dict[str, Measurement]] = {}
    for each in measurements:
        rows.setdefault(each.size, {})[each.implementation] = each
    return [rows[size] for size in sorted(rows)]


def _make_cells(row: dict[str, Measurement], names: Sequence[str]) -> list[Text]:
    library = row[LIBRARY]
    best = max(row.values(), key=lambda each: each.busbw) if len(names) > 1 else None
    cells = [Text(sizes.format_size(library.size)), Text(_format_time(library.seconds)), Text(f"{library.algbw:.3f}")]
    for name in names:
        measurement = row.get(name)
        if measurement is None:
            cells.append(Text(""))
        elif not measurement.is_correct:
            cells.append(Text("WRONG", style="bold red"))
        else:
            cells.append(Text(f"{measurement.busbw:.3f}", style="bold" if measurement is best else ""))
    return cells


def _format_time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


COLOURS = (plots.MAIN, plots.QUIET, plots.SPARE, plots.SECOND, plots.BAD)
"""The colours of the implementations, in their order."""
_COLUMNS = 4


def save_plot(report: BenchReport, path: Path) -> None:
    """Write the plot to a PNG file. Raises `MissingExtraError` without matplotlib."""
    plots.save(path, lambda figure: draw_plot(figure, report))


def draw_plot(figure: Figure, report: BenchReport) -> None:
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
    for colour, implementation in zip(COLOURS, list_implementations(report), strict=False):
        points = sorted(
            (each.size, each.busbw)
            for each in report.measurements
            if (each.collective, each.implementation) == (collective, implementation) and each.is_correct
        )
        if points:
            x, y = zip(*points, strict=True)
            name = name_of(implementation, report)
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
