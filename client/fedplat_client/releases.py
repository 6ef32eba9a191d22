"""What `fedplat-client released` prints: the record of what has left a client, or the result of its check."""

from __future__ import annotations

import collections
import csv
import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from fedplat import texts
from fedplat_client import log
from fedplat_client._state import released
from fedplat_client._state.released import ReleasedLine

_COLUMNS = (
    *("time", "content", "receiver", "job", "job_id", "round", "attempt", "trainer", "size_bytes", "digest"),
    *("masked", "min_clients", "noise_multiplier", "num_examples", "metrics"),
)
_CSV_BYTES = 2**16
_TITLES = ("time (UTC)", "what", "to", "job", "round", "size", "protection", "digest")


def show(path: Path, form: str, limit: int | None) -> None:
    """Print a record, or its last lines, as a table, CSV or JSON. Raises `OSError` or `msgspec.DecodeError`."""
    lines = collections.deque(released.read(path), limit) if limit else released.read(path)
    if form == "json":
        for each in lines:
            click.echo(msgspec.json.encode(each))
    elif form == "csv":
        for text in write_csv(lines):
            sys.stdout.write(text)
    else:
        _print_table([_TITLES, *map(_list_cells, lines)])


def write_csv(lines: Iterable[ReleasedLine]) -> Iterator[str]:
    """Yield a record as CSV, its titles first."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(_COLUMNS)
    for each in lines:
        values = _list_values(each)
        writer.writerow(_guard(values[name]) for name in _COLUMNS)
        if buffer.tell() >= _CSV_BYTES:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def verify(path: Path) -> None:
    """Print that a record is as it was written, or raise `ClickException`. Raises `OSError`."""
    found = released.verify(path)
    if found.wrong:
        raise click.ClickException(
            f"line {found.wrong} of {path} is not as it was written, or lines before it were removed; the lines up to "
            f"{found.wrong - 1} are unchanged"
        )
    click.echo(found.describe_unchanged())


def _list_values(release: ReleasedLine) -> Mapping[str, Any]:
    values = {name: getattr(release, name) for name in release.__struct_fields__}
    shown = {"receiver": release.receiver or "server", "metrics": msgspec.json.encode(release.metrics).decode()}
    return values | msgspec.structs.asdict(release.protection) | shown


def _guard(value: object) -> object:
    """Return a cell that a spreadsheet does not run: the server chooses the names of jobs."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _list_cells(release: ReleasedLine) -> tuple[str, ...]:
    masks, size = release.protection, texts.size(release.size_bytes) if release.size_bytes else ""
    protection = f"sums of {masks.min_clients} or more" if masks.masked else ""
    if masks.noise_multiplier:
        protection += f", noise {masks.noise_multiplier:.3g}"
    job, number = f"{release.job} ({release.job_id})", f"{release.round}.{release.attempt}"
    receiver = release.receiver or "server"
    if release.content == "decision":
        job, number, receiver = f"number {release.approvals}", "", ""
    return release.time[:19], release.content, receiver, job, number, size, protection, release.digest[:16]


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    shown = [[log.make_printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in shown) for place in range(len(_TITLES))]
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
