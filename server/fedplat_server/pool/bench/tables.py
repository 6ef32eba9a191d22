"""What was measured, as tables for people."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from fedplat.backends.ranks.bench.records import FACTORS, Measurement, Report
from fedplat_server.pool.bench import sizes

WAYS = ("library", "star", "tree", "ring", "shared")


def name_of(way: str, report: Report) -> str:
    """A way by the name that operators know it by."""
    return {"library": {"gloo": "Gloo", "nccl": "NCCL"}[report.library], "shared": "shared memory"}.get(way, way)


def busbw(report: Report) -> Table:
    """A row for each collective and size: the library's time and algbw, and the busbw of all ways."""
    ways = [way for way in WAYS if any(each.way == way for each in report.measurements)]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("collective", no_wrap=True)
    library = name_of("library", report)
    for title in ("size", f"{library} time", "algbw", *(f"busbw {name_of(way, report)}" for way in ways)):
        table.add_column(title, justify="right")
    for collective in FACTORS:
        rows = _rows([each for each in report.measurements if each.collective == collective])
        for number, row in enumerate(rows):
            name = collective if number == 0 else ""
            table.add_row(name, *_cells(row, ways), end_section=number == len(rows) - 1)
    return table


def summary(report: Report) -> list[str]:
    """What collectives are to be compared with, and under which conditions that was measured."""
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
        lines.append("the host was busy with something else, which took its share: measure again when it is idle")
    return lines


def _rows(found: Sequence[Measurement]) -> list[dict[str, Measurement]]:
    rows: dict[int, dict[str, Measurement]] = {}
    for each in found:
        rows.setdefault(each.size, {})[each.way] = each
    return [rows[size] for size in sorted(rows)]


def _cells(row: dict[str, Measurement], ways: Sequence[str]) -> list[Text]:
    library = row["library"]
    best = max(row.values(), key=lambda each: each.busbw)
    cells = [Text(sizes.shown(library.size)), Text(_time(library.seconds)), Text(f"{library.algbw:.3f}")]
    for way in ways:
        found = row.get(way)
        if found is None:
            cells.append(Text(""))
        elif not found.is_correct:
            cells.append(Text("WRONG", style="bold red"))
        else:
            cells.append(Text(f"{found.busbw:.3f}", style="bold" if found is best else ""))
    return cells


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds * 1e6:.0f} µs"
