"""The results of a measurement as a table and text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from fedplat.pytorch.distributed.bench.records import FACTORS, LIBRARY, BenchReport, Measurement
from fedplat_server.cli.bench import sizes


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
