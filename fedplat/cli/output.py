"""The output of commands: results on stdout, as tables, names or JSON, and messages on stderr.

A table that is too wide continues on indented lines, column by column:

```
JOB                 NAME    STATUS   ROUND
  POPULATION  CREATED              REASON
j-0123456789abcdef  digits  RUNNING  3/10
  demo        2026-11-23 14:03:05  3 of 11 clients wait
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import json
import math
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Generic, TextIO, TypeVar

from google.protobuf.message import Message
from rich.cells import cell_len, set_cell_size
from rich.console import Console
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
_ROWS_AT_ONCE = 1000
Row = TypeVar("Row")
"""A protobuf message, or a dataclass."""


class OutputFormat(enum.StrEnum):
    """A format of results: for people (`table`, `wide`) or for programs."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    JSONL = "jsonl"
    NAME = "name"


class Output:
    """Prints results in a format. Colours appear only on a terminal, and never with NO_COLOR.

    `as_json` is short for the format JSON.
    """

    def __init__(self, as_json: bool = False, form: OutputFormat | None = None) -> None:
        self.form = form or (OutputFormat.JSON if as_json else OutputFormat.TABLE)
        self.screen = Console(markup=False, highlight=False, emoji=False)
        self.messages = Console(stderr=True, soft_wrap=True, markup=False, highlight=False, emoji=False)

    @property
    def as_json(self) -> bool:
        """True for the formats `json` and `jsonl`."""
        return self.form in (OutputFormat.JSON, OutputFormat.JSONL)

    @property
    def is_for_people(self) -> bool:
        """True for the formats `table` and `wide`."""
        return self.form in (OutputFormat.TABLE, OutputFormat.WIDE)

    @property
    def width(self) -> float:
        """The width of the terminal; infinite without one, because programs and pagers do not want folded lines."""
        return self.screen.width if self.screen.is_terminal else math.inf

    def json(self, value: object) -> None:
        """Print one line of JSON, and flush."""
        _write(sys.stdout, json.dumps(value, allow_nan=False))

    def line(self, text: str) -> None:
        """Print one line of a result, and flush."""
        _write(sys.stdout, formats.printable(text))

    def sentence(self, text: str) -> None:
        """Print text that is folded to the width of a terminal."""
        width = int(self.width) if math.isfinite(self.width) else sys.maxsize
        for line in fold(formats.printable(text), width):
            _write(sys.stdout, line)

    def note(self, text: str) -> None:
        """Print one line on stderr that is not part of the result."""
        _write(sys.stderr, formats.printable(text))

    def error(self, text: str) -> None:
        """Print one line of an error message on stderr."""
        self.messages.print(Text("error: ", style="bold red"), Text(formats.printable(text)), sep="")

    def records(self, messages: Iterable[Any]) -> None:
        """Print a list as JSON, as it arrives: one line with an array or, in the format `jsonl`, a line per element."""
        if self.form is OutputFormat.JSONL:
            for message in messages:
                self.json(to_record(message))
            return
        rest = iter(messages)
        first = next(rest, None)  # before any output: the server may refuse the request
        sys.stdout.write("[")
        for number, message in enumerate(itertools.chain(() if first is None else (first,), rest)):
            sys.stdout.write((", " if number else "") + json.dumps(to_record(message), allow_nan=False))
        _write(sys.stdout, "]")

    def rows(self, rows: Iterable[Row], layout: ListLayout[Row], empty: str, *, folds: bool = False) -> None:
        """Print the rows of a list in the format; without rows, print `empty` on stderr if the format is for people.

        `folds`: see `table`.
        """
        if self.as_json:
            self.records(rows)
        elif self.form is OutputFormat.NAME:
            for row in rows:
                self.line(layout.name_of(row))
        else:
            columns = layout.select(self.form is OutputFormat.WIDE)
            cells = (tuple(column.cell(row) for column in columns) for row in rows)
            self.table([column.name for column in columns], cells, empty, folds=folds)

    def extend(self, layout: ListLayout[Row]) -> Callable[[Sequence[Row]], None]:
        """Return a function that prints the next rows of a list in the format, with the head of a table once."""
        columns = layout.select(self.form is OutputFormat.WIDE)
        table = TextTable([column.name for column in columns], self.width, cuts=self.form is OutputFormat.TABLE)
        is_begun = False

        def add(rows: Sequence[Row]) -> None:
            nonlocal is_begun
            if not self.is_for_people:
                self.rows(rows, layout, "")
            elif rows:
                lines = table.format([tuple(column.cell(row) for column in columns) for row in rows])
                if not is_begun:
                    self._heading(table.head())
                is_begun = True
                _write(sys.stdout, "\n".join(lines))

        return add

    def show(self, message: Message, name: str, fields: Callable[[], Mapping[str, str]]) -> None:
        """Print one thing in the format: its name, its message as one line of JSON, or its fields."""
        if self.as_json:
            self.json(to_record(message))
        elif self.form is OutputFormat.NAME:
            self.line(name)
        else:
            self.fields(fields())

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], empty: str, *, folds: bool = False) -> None:
        """Print a table; columns with a name that begins with `#` hold numbers. Without rows, print `empty` on stderr.

        Rows are printed in batches as they arrive; later ones may be wider than the first. On a terminal, a last column
        that is too long is cut, or folded if `folds` or in the format `wide`.
        """
        rest = iter(rows)
        if not (part := list(itertools.islice(rest, _ROWS_AT_ONCE))):
            return self.note(empty)
        printed = TextTable(columns, self.width, cuts=not folds and self.form is OutputFormat.TABLE)
        lines = printed.format(part)
        self._heading(printed.head())
        while part:
            sys.stdout.writelines(line + "\n" for line in lines)
            part = list(itertools.islice(rest, _ROWS_AT_ONCE))
            lines = printed.format(part)
        sys.stdout.flush()

    def heading(self, text: str) -> None:
        """Print an empty line and the heading of the part that follows."""
        self._heading(["", text])

    def fields(self, pairs: Mapping[str, str]) -> None:
        """Print names and values, one pair per line; values that are too long for the terminal are folded."""
        names = max(map(len, pairs), default=0) + 2
        for name, value in pairs.items():
            width = max(20, int(self.width) - names) if math.isfinite(self.width) else sys.maxsize
            first, *more = fold(formats.printable(value), width)
            with self.screen.capture() as bold:
                self.screen.print(Text(name, style="bold"), end="")
            _write(sys.stdout, (bold.get() + " " * (names - len(name)) + first).rstrip())
            for line in more:
                _write(sys.stdout, " " * names + line)

    def _heading(self, lines: Sequence[str]) -> None:
        for line in lines:
            with self.screen.capture() as bold:
                self.screen.print(Text(line, style="bold"), soft_wrap=True)
            sys.stdout.write(bold.get())
        sys.stdout.flush()

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


_OF_TRANSFERS = frozenset({"fedplat.wire.v1.ModelRef.blake3"})
"""Fields that only clients get, for their downloads."""


def to_record(message: Any) -> dict[str, Any]:
    """Convert a protobuf message to JSON: every field by name, enums without their prefix, absent messages as null.

    protobuf's own JSON writes 64-bit integers as strings and NaN as "NaN"; this writes numbers and null. A dataclass
    has its fields.
    """
    if not isinstance(message, Message):
        return dataclasses.asdict(message)
    record: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.full_name in _OF_TRANSFERS:
            continue
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


_GAP, _INDENT = "  ", "  "
_LEAST_WIDTH = 12
"""The last column moves to a line of its own rather than be shorter than this."""


@dataclasses.dataclass(frozen=True)
class ListColumn(Generic[Row]):
    """A column of a list. Names that begin with `#` belong to numbers; `is_wide` columns appear with `-o wide` only."""

    name: str
    cell: Callable[[Row], str]
    is_wide: bool = False


@dataclasses.dataclass(frozen=True)
class ListLayout(Generic[Row]):
    """How the rows of a list are printed: its columns, and the name of a row for `-o name`."""

    name_of: Callable[[Row], str]
    columns: Sequence[ListColumn[Row]]

    def select(self, wide: bool) -> Sequence[ListColumn[Row]]:
        """Return the columns of the table or, if `wide`, all columns."""
        return [column for column in self.columns if wide or not column.is_wide]


class TextTable:
    """Prints rows in batches: the widths of later batches may grow, but never shrink.

    `width` is that of the terminal, or infinite. The last column is cut to it if `cuts`, and folded otherwise.
    """

    def __init__(self, names: Sequence[str], width: float = math.inf, *, cuts: bool = True) -> None:
        self._names = [name.removeprefix("#") for name in names]
        self._is_number = [name.startswith("#") for name in names]
        self._widths = [cell_len(name) for name in self._names]
        self._width, self._cuts = width, cuts

    def head(self) -> list[str]:
        """Return the lines with the names of the columns, for the rows that were formatted so far."""
        return self._row(self._names, self._lines())

    def format(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """Return the lines of rows."""
        shown = [[formats.printable(cell) for cell in row] for row in rows]
        self._widths = [max([width, *(cell_len(row[at]) for row in shown)]) for at, width in enumerate(self._widths)]
        lines = self._lines()
        return [line for row in shown for line in self._row(row, lines)]

    def _lines(self) -> list[list[int]]:
        """Return which columns stand on which line."""
        lines: list[list[int]] = [[]]
        used, last = 0, len(self._widths) - 1
        for at, width in enumerate(self._widths):
            needed = min(width, max(_LEAST_WIDTH, cell_len(self._names[at]))) if at == last else width
            if lines[-1] and used + len(_GAP) + needed > self._width:
                lines.append([])
                used = len(_INDENT) - len(_GAP)
            used += needed + (len(_GAP) if lines[-1] or len(lines) > 1 else 0)
            lines[-1].append(at)
        return lines

    def _row(self, cells: Sequence[str], lines: Sequence[Sequence[int]]) -> list[str]:
        printed: list[str] = []
        for number, columns in enumerate(lines):
            start = _INDENT if number else ""
            *others, last = (self._pad(cells[at], at) for at in columns)
            printed += self._fit(start + "".join(cell + _GAP for cell in others), last.rstrip())
        return [line for position, line in enumerate(printed) if line.strip() or not position]

    def _pad(self, cell: str, at: int) -> str:
        space = " " * (self._widths[at] - cell_len(cell))
        return space + cell if self._is_number[at] else cell + space

    def _fit(self, start: str, last: str) -> list[str]:
        """Join a line; if it is longer than the terminal, cut its last cell, or fold it within its column."""
        line = (start + last).rstrip()
        if cell_len(line) <= self._width:
            return [line]
        width = max(2, int(self._width))
        if self._cuts:
            return [set_cell_size(line, width - 1).rstrip() + "…"]
        return fold(line, width, " " * cell_len(start))


def fold(line: str, width: int, indent: str = "") -> list[str]:
    """Fold a line at its spaces where possible; the lines after the first begin with `indent` if there is room."""
    lines: list[str] = []
    indent = indent if width >= len(indent) + _LEAST_WIDTH else ""
    rest = line
    while cell_len(rest) > width:
        part = set_cell_size(rest, width).rstrip(" ")
        at = part.rfind(" ", len(indent) + _LEAST_WIDTH // 2)
        if at > 0 and rest[len(part) : len(part) + 1] != " ":
            part = part[:at]
        lines.append(part.rstrip())
        rest = indent + rest[len(part) :].lstrip(" ")
    return [*lines, rest]
