"""The output of every benchmark: a table for people, one JSON object for programs, and a saved result for the page.

The file, `benchmarks/results/NAME.json`, is the source of the tables of docs/performance.md (`page.py`), so that all
its numbers are generated. With `--json` the last line of stdout is one object with the keys `name`, `title`,
`columns`, `rows` (a list of cells for each row, in the order of `columns`), `notes`, `command`, `machine` and `date`. A
program that adds keys lists them in its `--help`.
"""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
Cell = str | int | float | None
"""A table cell. Numbers are shown with three digits, None as "not measured"."""
JSON_HELP = (
    "Make the last line of stdout one JSON object: name, title, columns, rows (cells in the order of columns), notes, "
    "command, machine, date."
)
JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
SaveOption = Annotated[bool, typer.Option("--save", help="Save the result for docs/performance.md.")]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a benchmark. `rows` have one cell for each of `columns`; column names contain the units."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    command: str = ""
    machine: str = ""
    date: str = ""


def machine() -> str:
    """Describe the machine and the relevant versions in one line."""
    with open("/proc/cpuinfo") as file:
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("grpcio", "numpy"))
    cores = len(os.sched_getaffinity(0))
    return f"{models[0]}, {cores} cores, {memory:.0f} GiB, Linux, Python {platform.python_version()}, {versions}"


def finish(
    report: Report,
    as_json: bool,
    save: bool,
    *,
    figures: Mapping[str, float] | None = None,
    parts: Mapping[str, Report] | None = None,
) -> None:
    """Print a report, and save it for the page if `save`.

    `figures` and `parts` are further keys of the JSON object; parts are printed and saved like the report.
    """
    first, *others = map(_stamped, (report, *(parts or {}).values()))
    for each in (first, *others):
        if save:
            write(each, RESULTS)
        if not as_json:
            show(each)
    if as_json:
        record = msgspec.structs.asdict(first) | dict(figures or {}) | dict(zip(parts or {}, others, strict=True))
        print(msgspec.json.encode(record).decode(), flush=True)


def write(report: Report, folder: Path) -> None:
    """Save a report as a file of the folder, for the page."""
    folder.mkdir(exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(_stamped(report)), indent=1) + b"\n"
    (folder / f"{report.name}.json").write_bytes(text)


def _stamped(report: Report) -> Report:
    """Return a report with the command, the machine and the date of this run, unless it has its own."""
    program = Path(sys.argv[0]).resolve()
    shown = program.relative_to(HERE) if program.is_relative_to(HERE) else program.name
    options = [argument for argument in sys.argv[1:] if argument not in ("--json", "--save")]
    return msgspec.structs.replace(
        report,
        command=report.command or shlex.join(["python", f"benchmarks/{shown}", *options]),
        machine=report.machine or machine(),
        date=report.date or datetime.date.today().isoformat(),
    )


def show(report: Report) -> None:
    """Print a report as a table."""
    table = Table(title=report.title)
    for index, column in enumerate(report.columns):
        table.add_column(column, justify="right" if index else "left")
    for row in report.rows:
        table.add_row(*map(shown, row))
    console = Console()
    console.print(table)
    for note in report.notes:
        console.print(note, markup=False)  # rich would read the name of an extra, such as fedplat[ray], as a style


def shown(cell: Cell) -> str:
    """Format a cell for people."""
    if cell is None:
        return "not measured"
    if isinstance(cell, float):
        return f"{cell:.3g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def markdown(report: Report) -> str:
    """Format a report as a table for docs/performance.md, with its source."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [line([shown(cell) for cell in row]) for row in report.rows]
    rule = line(["---"] + ["---:"] * (len(report.columns) - 1))
    source = f"`{report.command}`, {report.date}; {report.machine}."
    return "\n".join([line(report.columns), rule, *rows, "", source, *(f"\n{note}" for note in report.notes)])
