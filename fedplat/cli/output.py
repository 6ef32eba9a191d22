"""What a command prints: results on stdout, as tables or as JSON, and messages on stderr."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TextIO

from google.protobuf.message import Message
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from fedplat import admin
from fedplat.cli import formats

PROGRESS_FROM_BYTES = 8 * 2**20
"""Smaller transfers are over before a bar is seen."""
_RESULT_WIDTH = 1000
_ROWS_AT_ONCE = 1000


class Output:
    """Prints for people, or for programs when `as_json`. Colours appear on a terminal only, and never with NO_COLOR."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        # Results are as wide as they are, as kubectl's: an id that is cut or folded cannot be copied.
        self.console = Console(width=_RESULT_WIDTH, markup=False, highlight=False, emoji=False)
        self.screen = Console(markup=False, highlight=False, emoji=False)
        self.messages = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)

    def json(self, value: object) -> None:
        """One line of JSON, at once."""
        _write(sys.stdout, json.dumps(value, allow_nan=False))

    def line(self, text: str) -> None:
        """One line of a result for people, at once."""
        _write(sys.stdout, formats.printable(text))

    def note(self, text: str) -> None:
        """One line that is no result."""
        _write(sys.stderr, formats.printable(text))

    def error(self, text: str) -> None:
        """One line that says what went wrong."""
        self.messages.print(Text("error: ", style="bold red"), Text(formats.printable(text)), sep="")

    def records(self, messages: Iterable[Message]) -> None:
        """One line of JSON, a list, whose elements are written as they come."""
        rest = iter(messages)
        first = next(rest, None)  # before anything is written: the server may refuse
        sys.stdout.write("[")
        for number, message in enumerate(itertools.chain(() if first is None else (first,), rest)):
            sys.stdout.write((", " if number else "") + json.dumps(to_record(message), allow_nan=False))
        _write(sys.stdout, "]")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
        """A table; columns whose name begins with `#` hold numbers. Without rows the sentence `empty` on stderr.

        Rows are printed as they come, many at a time; later ones may be wider than the first.
        """
        rest = iter(rows)
        if not (part := list(itertools.islice(rest, _ROWS_AT_ONCE))):
            return self.note(empty)
        widths = [0] * len(columns)
        shows_names = True
        while part:
            widths = [
                max(width, *(cell_len(formats.printable(row[at])) for row in part)) for at, width in enumerate(widths)
            ]
            self._print(table(columns, part, widths, shows_names))
            part, shows_names = list(itertools.islice(rest, _ROWS_AT_ONCE)), False

    def fields(self, pairs: Mapping[str, str]) -> None:
        """Names and values, a line each."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in pairs.items():
            grid.add_row(Text(name), Text(formats.printable(value)))
        self._print(grid)

    def _print(self, renderable: RenderableType) -> None:
        with self.console.capture() as captured:
            self.console.print(renderable)
        # rich fills every line up to the width of the table.
        self.console.file.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())

    @contextlib.contextmanager
    def steps(self, description: str) -> Generator[admin.ProgressCallback]:
        """Show a progress bar on stderr, if that is a terminal; yields the function that is told of each step."""
        if self.as_json or not self.messages.is_terminal or self.messages.is_dumb_terminal:
            yield lambda done, total: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.messages, transient=True) as bar:
            task = bar.add_task(description, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @contextlib.contextmanager
    def transfer(self, description: str) -> Generator[admin.ProgressCallback]:
        """A progress bar on stderr, if that is a terminal and the transfer is large."""
        if not self.messages.is_terminal:
            yield lambda done, total: None
            return
        columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, console=self.messages, transient=True) as bar:
            task = bar.add_task(description, total=None, visible=False)
            yield lambda done, total: bar.update(
                task, completed=done, total=total, visible=total >= PROGRESS_FROM_BYTES
            )


def _write(stream: TextIO, text: str) -> None:
    # Not through rich: when Ctrl-C comes while it prints, it prints the same again with its next line.
    stream.write(text + "\n")
    stream.flush()


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int] = (), shows_names: bool = True
) -> Table:
    """A table without lines. Columns whose name begins with `#` are right-aligned; the last one is cut if need be.

    Columns but the last are at least as wide as their names and `widths`.
    """
    result = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=shows_names)
    for position, name in enumerate(columns):
        # rich takes width from columns that may wrap; only the last may, and its cells are cut instead.
        is_last = position == len(columns) - 1
        justify = "right" if name.startswith("#") else "left"
        shown = name.removeprefix("#")
        width = max(len(shown), widths[position]) if widths and not is_last else None
        result.add_column(shown, justify=justify, no_wrap=not is_last, min_width=width)
    for row in rows:
        result.add_row(*(Text(formats.printable(cell), no_wrap=True, overflow="ellipsis") for cell in row))
    return result


def to_record(message: Message) -> dict[str, Any]:
    """A protobuf message as JSON: every field by its name, enums without their prefix, absent messages as null.

    protobuf's own JSON writes 64-bit integers as text and NaN as "NaN"; here they are a number and null.
    """
    record: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = field.message_type.fields_by_name["value"].enum_type
            record[field.name] = {key: _to_json(values, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            record[field.name] = [_to_json(field.enum_type, item) for item in value]
        elif field.has_presence and not message.HasField(field.name):
            record[field.name] = None
        else:
            record[field.name] = _to_json(field.enum_type, value)
    return record


def _to_json(enum: Any, value: Any) -> Any:  # a descriptor: protobuf's stubs do not agree on its class
    if isinstance(value, Message):
        return to_record(value)
    if enum is not None:
        return formats.name_of(enum, value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
