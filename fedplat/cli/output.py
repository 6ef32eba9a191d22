"""The output of commands: results on stdout, as tables or as JSON, and messages on stderr."""

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
"""Smaller transfers end before a progress bar would be visible."""
_RESULT_WIDTH = 1000
_ROWS_AT_ONCE = 1000


class Output:
    """Prints results as text, or as JSON if `as_json`. Colours appear only on a terminal, and never with NO_COLOR."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        # Results are not wrapped, as in kubectl: an id that is truncated or folded cannot be copied.
        self.console = Console(width=_RESULT_WIDTH, markup=False, highlight=False, emoji=False)
        self.screen = Console(markup=False, highlight=False, emoji=False)
        self.messages = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)

    def json(self, value: object) -> None:
        """Print one line of JSON, and flush."""
        _write(sys.stdout, json.dumps(value, allow_nan=False))

    def line(self, text: str) -> None:
        """Print one line of a result, and flush."""
        _write(sys.stdout, formats.printable(text))

    def note(self, text: str) -> None:
        """Print one line on stderr that is not part of the result."""
        _write(sys.stderr, formats.printable(text))

    def error(self, text: str) -> None:
        """Print one line of an error message on stderr."""
        self.messages.print(Text("error: ", style="bold red"), Text(formats.printable(text)), sep="")

    def records(self, messages: Iterable[Message]) -> None:
        """Print a list as one line of JSON, whose elements are written as they arrive."""
        rest = iter(messages)
        first = next(rest, None)  # before any output: the server may refuse the request
        sys.stdout.write("[")
        for number, message in enumerate(itertools.chain(() if first is None else (first,), rest)):
            sys.stdout.write((", " if number else "") + json.dumps(to_record(message), allow_nan=False))
        _write(sys.stdout, "]")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str) -> None:
        """Print a table; columns with a name that begins with `#` hold numbers. Without rows, print `empty` on stderr.

        Rows are printed in batches as they arrive; later ones may be wider than the first.
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
        """Print names and values, one pair per line."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in pairs.items():
            grid.add_row(Text(name), Text(formats.printable(value)))
        self._print(grid)

    def _print(self, renderable: RenderableType) -> None:
        with self.console.capture() as captured:
            self.console.print(renderable)
        # rich pads every line to the width of the table.
        self.console.file.writelines(line.rstrip() + "\n" for line in captured.get().splitlines())

    @contextlib.contextmanager
    def steps(self, description: str) -> Generator[admin.ProgressCallback]:
        """Show a progress bar on stderr, if that is a terminal; yield the callback for its steps."""
        if self.as_json or not self.messages.is_terminal or self.messages.is_dumb_terminal:
            yield lambda done, total: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.messages, transient=True) as bar:
            task = bar.add_task(description, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)

    @contextlib.contextmanager
    def transfer(self, description: str) -> Generator[admin.ProgressCallback]:
        """Show a progress bar on stderr, if that is a terminal and the transfer is large; yield its callback."""
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
    # Not through rich: if Ctrl-C interrupts it while printing, it prints the same text again with its next line.
    stream.write(text + "\n")
    stream.flush()


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int] = (), shows_names: bool = True
) -> Table:
    """Return a table without lines. Columns with a name that begins with `#` are right-aligned.

    All columns except the last are at least as wide as their names and `widths`; the last is truncated if necessary.
    """
    result = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=shows_names)
    for position, name in enumerate(columns):
        # rich takes width from columns that may wrap: only the last may, and its cells are truncated instead.
        is_last = position == len(columns) - 1
        justify = "right" if name.startswith("#") else "left"
        shown = name.removeprefix("#")
        width = max(len(shown), widths[position]) if widths and not is_last else None
        result.add_column(shown, justify=justify, no_wrap=not is_last, min_width=width)
    for row in rows:
        result.add_row(*(Text(formats.printable(cell), no_wrap=True, overflow="ellipsis") for cell in row))
    return result


def to_record(message: Message) -> dict[str, Any]:
    """Convert a protobuf message to JSON: every field by name, enums without their prefix, absent messages as null.

    protobuf's own JSON writes 64-bit integers as strings and NaN as "NaN"; this writes numbers and null.
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
