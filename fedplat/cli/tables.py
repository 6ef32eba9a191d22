"""Tables of text: columns, and rows that fold to the width of a terminal without breaking an id.

A table that is too wide continues on indented lines, column by column:

```
JOB                 NAME    STATUS   ROUND
  POPULATION  CREATED              REASON
j-0123456789abcdef  digits  RUNNING  3/10
  demo        2026-11-23 14:03:05  3 of 11 clients wait
```
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from google.protobuf.message import Message
from rich.cells import cell_len, set_cell_size

from fedplat.cli import formats

Row = TypeVar("Row", bound=Message)
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
