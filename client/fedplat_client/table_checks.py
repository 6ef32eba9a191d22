"""What `fedplat-client table check` prints: how the rows of a table fit its dictionary, in counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import click
import msgspec

from fedplat import texts
from fedplat.errors import FedplatError, MissingExtraError, ProcedureError
from fedplat.procedures.tables import SiteTable, TableCounts
from fedplat.tables import CsvFile, DuckDBTable
from fedplat.tables.files import Frame
from fedplat_client import log
from fedplat_client.trainer_options import UsageError

_TITLES = ("column", "type", "rows", "missing", "other type", "outside")


class TableCheckOptions(TypedDict):
    """The values of `OPTIONS`."""

    file: Path
    columns: Path
    person: str | None
    delimiter: str | None
    encoding: str | None
    table: str | None
    query: str | None


OPTIONS = (
    click.argument("file", type=click.Path(path_type=Path, dir_okay=False)),
    click.option(
        "--columns",
        type=click.Path(path_type=Path, dir_okay=False),
        required=True,
        metavar="FILE",
        help="The dictionary of the table, in TOML or JSON.",
    ),
    click.option("--person", metavar="NAME", help="Column that identifies a person; default: that of the dictionary."),
    click.option("--delimiter", metavar="CHARACTER", help="What separates the fields of a CSV file; default: a comma."),
    click.option("--encoding", metavar="NAME", help="Encoding of a CSV file, such as latin-1; default: utf-8."),
    click.option("--table", metavar="NAME", help="Table of a DuckDB database; default: the only one."),
    click.option("--query", metavar="SQL", help="Query of a DuckDB database, instead of a table."),
)
"""The arguments and options of the command, besides the form of what it prints."""


def check(options: TableCheckOptions, *, as_json: bool) -> bool:
    """Print the counts of a table, and return whether all of its rows fit.

    Raises `ClickException` for a table that cannot be read, and `UsageError` for a wrong option.
    """
    try:
        table = SiteTable(_find_rows(options), options["columns"], options["person"])
    except (ProcedureError, MissingExtraError) as exc:
        raise UsageError(log.make_printable(str(exc))) from exc
    try:
        counts = table.count()
    except FedplatError as exc:
        # Text of a library may have values, which its owner may see.
        cause = f": {texts.describe(exc.__cause__)}" if exc.__cause__ is not None else ""
        raise click.ClickException(log.make_printable(f"{exc}{cause}")) from exc
    mistakes = counts.list_mistakes()
    if not counts.columns and options["file"].suffix.lower() == ".csv":
        mistakes.append(
            "if the fields of the file are not separated by commas, name what does, such as --delimiter ';'"
        )
    if as_json:
        columns = {name: _list_counts(counts, name) for name in counts.columns}
        click.echo(msgspec.json.encode({"rows": counts.rows, "columns": columns, "mistakes": mistakes}))
    else:
        for line in _format(counts, mistakes):
            click.echo(log.make_printable(line))
    return not mistakes


def _find_rows(options: TableCheckOptions) -> Frame:
    file, suffix = options["file"], options["file"].suffix.lower()
    of_csv = {name: value for name in ("delimiter", "encoding") if (value := options[name]) is not None}
    of_database = {name: value for name in ("table", "query") if (value := options[name]) is not None}
    for given, kind in ((of_csv, ".csv"), (of_database, ".duckdb")):
        if given and suffix != kind:
            raise UsageError(f"--{min(given)} is for files {kind}; expected such a file, or not the option")
    if of_csv:
        return CsvFile(file, **of_csv)
    return DuckDBTable(file, **of_database) if of_database else file


def _list_counts(counts: TableCounts, name: str) -> dict[str, str | int]:
    column, declared = counts.columns[name], counts.declared[name]
    assert declared is not None
    kind = str(declared.__struct_config__.tag)
    return {"type": kind, "missing": column.missing, "other_type": column.invalid, "outside": column.outside}


def _format(counts: TableCounts, mistakes: list[str]) -> Iterator[str]:
    found = {name: _list_counts(counts, name) for name in counts.columns}
    rows: list[tuple[str, ...]] = [_TITLES]
    for name, each in found.items():
        numbers = (counts.rows, each["missing"], each["other_type"], each["outside"])
        rows.append((name, str(each["type"]), *(f"{number:,}" for number in numbers)))
    widths = [max(len(row[place]) for row in rows) for place in range(len(_TITLES))]
    for row in rows:
        texts_first, numbers_after = zip(row[:2], widths[:2], strict=True), zip(row[2:], widths[2:], strict=True)
        cells = [cell.ljust(width) for cell, width in texts_first] + [
            cell.rjust(width) for cell, width in numbers_after
        ]
        yield "  ".join(cells).rstrip()
    yield ""
    yield from mistakes or ["All rows are as declared."]
