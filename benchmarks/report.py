"""What every benchmark prints: a table for people, one line of JSON for programs, and a file for the page.

The file, `benchmarks/results/NAME.json`, is what `page.py` makes the tables of docs/performance.md from, so that no
number there was typed by hand.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
Cell = str | int | float | None
"""A number is shown with three digits; None was not measured."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one question. `rows` have one cell for each of `columns`; units stand in the columns' names."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    command: str = ""
    machine: str = ""
    date: str = ""


def machine() -> str:
    """The machine and the versions that matter, in one line."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("grpcio", "numpy"))
    cores = len(os.sched_getaffinity(0))
    return f"{models[0]}, {cores} cores, {memory:.0f} GiB, Linux, Python {platform.python_version()}, {versions}"


def finish(report: Report, as_json: bool, save: bool) -> None:
    """Prints a report, and keeps it for the page if `save`."""
    program = Path(sys.argv[0])
    options = [argument for argument in sys.argv[1:] if argument not in ("--json", "--save")]
    report = msgspec.structs.replace(
        report,
        command=shlex.join(["python", f"benchmarks/{program.name}", *options]),
        machine=machine(),
        date=datetime.date.today().isoformat(),
    )
    content = msgspec.json.encode(report)
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{report.name}.json").write_bytes(msgspec.json.format(content, indent=1) + b"\n")
    if as_json:
        print(json.dumps(json.loads(content)))
        return
    show(report)


def show(report: Report) -> None:
    """Prints a report's table for people."""
    table = Table(title=report.title)
    for index, column in enumerate(report.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in report.rows:
        table.add_row(*map(shown, row))
    console = Console()
    console.print(table)
    for note in report.notes:
        console.print(note, markup=False)  # a name of an extra, such as fedplat[ray], is no style


def shown(cell: Cell) -> str:
    """A cell as people read it."""
    if cell is None:
        return "not measured"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def markdown(report: Report) -> str:
    """The table of a report for docs/performance.md, with where it comes from."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [line([shown(cell) for cell in row]) for row in report.rows]
    rule = line(["---"] + ["---:"] * (len(report.columns) - 1))
    source = f"`{report.command}`, {report.date}; {report.machine}."
    return "\n".join([line(report.columns), rule, *rows, "", source, *(f"\n{note}" for note in report.notes)])
