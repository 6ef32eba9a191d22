"""Lists of the server: limits, counts, and tables that are drawn again and again (`--watch`)."""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

import click
import typer
from google.protobuf.message import Message
from rich.console import Group
from rich.live import Live
from rich.text import Text
from typer.core import TyperCommand
from typing_extensions import override

from fedplat.admin.patience import DEFAULT_TIMEOUT_S, Patience
from fedplat.cli import formats, session
from fedplat.cli.output import ListLayout, Output, OutputFormat, Row, TextTable

Page = TypeVar("Page", bound=Message)
DEFAULT_LIMIT = 50
WATCH_EVERY_S = 2.0
_WATCH = "--watch"

LimitOption = Annotated[
    int | None,
    typer.Option(
        "--limit",
        "-n",
        metavar="N",
        min=0,
        help=f"Maximum number of rows; 0: all. Default: {DEFAULT_LIMIT} in a table, all in other formats.",
        show_default=False,
    ),
]
WatchOption = Annotated[
    float | None,
    typer.Option(
        _WATCH,
        metavar="[SECONDS]",
        min=0.1,
        max=86_400.0,
        help=f"Draw the table again every few seconds, on a terminal. Default: {WATCH_EVERY_S:g}.",
        show_default=False,
    ),
]


FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Wait for new rows and show them.")]
FOLLOW_EVERY_S = 1.0


class WatchableCommand(TyperCommand):
    """A command whose option --watch may have a number of seconds, or stand alone."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        for at in range(end):
            if args[at] == _WATCH and not (at + 1 < end and _is_number(args[at + 1])):
                args[at] = f"{_WATCH}={WATCH_EVERY_S:g}"
        return super().parse_args(ctx, args)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class Order(enum.Enum):
    """The order of a table. A limit keeps the latest rows if the server can send them first, otherwise the first."""

    SERVER = enum.auto()
    NEWEST_FIRST = enum.auto()
    NEWEST_LAST = enum.auto()


@dataclasses.dataclass(frozen=True)
class Query(Generic[Row]):
    """A list of the server: the method, its request, and the text for a list without rows.

    `order` is that of the table. Formats for programs always have the server's order, the oldest first.
    """

    fetch: Callable[[Any], Any]
    request: Any
    rows_of: Callable[[Any], Sequence[Row]]
    empty: str
    order: Order = Order.SERVER


class QueryRows(Generic[Row], Iterator[Row]):
    """The rows of a query, at most `limit` (0: all). `total` is the number on the server, known after the first row."""

    def __init__(self, query: Query[Row], limit: int, for_people: bool = True) -> None:
        self.total = 0
        self.num_rows = 0
        self.has_more = False
        self._query, self._limit = query, limit
        newest_first = for_people and query.order is Order.NEWEST_FIRST
        latest = newest_first or (limit > 0 and query.order is not Order.SERVER)
        reverses = latest and not newest_first
        self._rows = self._reverse(latest) if reverses else self._fetch(latest)

    def __next__(self) -> Row:
        row = next(self._rows)
        self.num_rows += 1
        return row

    def _reverse(self, latest: bool) -> Iterator[Row]:
        yield from reversed(list(self._fetch(latest)))

    def _fetch(self, latest: bool) -> Iterator[Row]:
        request = type(self._query.request)()
        request.CopyFrom(self._query.request)
        request.page_size = min(self._limit, 2**31)
        if latest:
            request.newest_first = True
        left = self._limit
        while True:
            page = self._query.fetch(request)
            self.total = max(self.total, page.total)
            rows = self._query.rows_of(page)
            taken = rows[:left] if self._limit else rows
            left -= len(taken)
            self.has_more = bool(page.next_page_token) or len(taken) < len(rows)
            yield from taken
            if not page.next_page_token or (self._limit and not left):
                return
            request.page_token = page.next_page_token

    def note(self) -> str:
        """Return how many rows were left out, as a sentence; empty if none were."""
        if self.total > self.num_rows:
            return f"{self.num_rows:,} of {self.total:,}; --limit 0 for all"
        if self.has_more:  # the server does not count
            return note_more(self.num_rows)
        return ""


def note_more(num_rows: int) -> str:
    """Return the note of a list whose server does not count the rows."""
    return f"{num_rows:,} rows, and there are more; --limit 0 for all"


def show(
    command: session.CommandSession,
    query: Query[Row],
    layout: ListLayout[Row],
    limit: int | None = None,
    watch_s: float | None = None,
) -> None:
    """Print a list in the format that was chosen, or watch it. A table says on stderr how many rows it leaves out."""
    output = command.output
    if watch_s is not None:
        return _watch(command, query, layout, limit, watch_s)
    rows = QueryRows(query, choose_limit(limit, output), output.is_for_people)
    output.rows(rows, layout, query.empty)
    if output.is_for_people and (note := rows.note()):
        output.note(note)
    return None


def follow(
    command: session.CommandSession,
    query: Query[Row],
    layout: ListLayout[Row],
    continue_after: Callable[[Row], Mapping[str, Any]],
    limit: int | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Print a list, the oldest row first, and then each new row once, until Ctrl-C.

    `continue_after` returns the fields of the request for the rows after one. While the server cannot be reached, the
    command's patience retries.
    """
    output = command.output
    if output.form is OutputFormat.JSON:
        raise typer.BadParameter("--follow prints rows as they appear; expected --output jsonl, not json")
    add, number = output.extend(layout), choose_limit(limit, output)

    def fetch() -> list[Row]:
        return list(QueryRows(query, number, output.is_for_people))

    try:
        while True:
            rows = command.patience.run(command.client, fetch)
            add(rows)
            if rows:
                request = type(query.request)()
                request.CopyFrom(query.request)
                for name, value in continue_after(rows[-1]).items():
                    setattr(request, name, value)
                query, number = dataclasses.replace(query, request=request, order=Order.SERVER), 0
            pause(FOLLOW_EVERY_S)
    except KeyboardInterrupt as exc:
        raise typer.Exit(session.INTERRUPTED) from exc


def show_rows(
    output: Output, rows: Sequence[Row], layout: ListLayout[Row], empty: str, limit: int | None = None
) -> None:
    """Print the first rows of a list that is there as a whole. A table says on stderr how many it leaves out."""
    number = choose_limit(limit, output) or len(rows)
    output.rows(rows[:number], layout, empty)
    if output.is_for_people and number < len(rows):
        output.note(f"{number:,} of {len(rows):,}; --limit 0 for all")


def choose_limit(limit: int | None, output: Output) -> int:
    """Return the number of rows of a list: that of `--limit`, or the default of the format; 0 for all."""
    if limit is not None:
        return limit
    return DEFAULT_LIMIT if output.is_for_people else 0


def _watch(
    command: session.CommandSession,
    query: Query[Row],
    layout: ListLayout[Row],
    limit: int | None,
    every_s: float,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Draw a list again and again until Ctrl-C, which leaves the last picture."""
    output, screen = command.output, command.output.screen
    if not output.is_for_people:
        raise typer.BadParameter(f"--watch draws tables; expected --output table or wide, not {output.form}")
    if not screen.is_terminal or screen.is_dumb_terminal:
        raise typer.BadParameter("--watch needs a terminal as output; run the command repeatedly instead")

    def tell(text: str) -> None:
        screen.print(Text(formats.printable(text)))

    patience = Patience(command.patience.timeout_s or DEFAULT_TIMEOUT_S, tell)
    num_rows = min(limit or screen.height, max(1, screen.height - 4))
    try:
        with Live(console=screen, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                rows = patience.run(command.client, lambda: _take(QueryRows(query, num_rows)))
                live.update(_picture(output, query, layout, rows), refresh=True)
                pause(every_s)
    except KeyboardInterrupt as exc:
        raise typer.Exit(session.INTERRUPTED) from exc


def _take(rows: QueryRows[Row]) -> tuple[list[Row], str]:
    return list(rows), rows.note()


def _picture(output: Output, query: Query[Row], layout: ListLayout[Row], found: tuple[list[Row], str]) -> Group:
    rows, note = found
    columns = layout.select(output.form is OutputFormat.WIDE)
    table = TextTable([column.name for column in columns], output.width)
    lines = table.format([tuple(column.cell(row) for column in columns) for row in rows])
    caption = "  ".join(part for part in (formats.moment(time.time()), note.partition(";")[0]) if part)
    head = [Text(line, style="bold", no_wrap=True) for line in table.head()] if rows else [Text(query.empty)]
    return Group(*head, *(Text(line, no_wrap=True) for line in lines), Text(caption, style="dim"))
