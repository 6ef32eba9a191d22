"""The progress of a running simulation: a live table on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedplat.cli import formats
from fedplat.cli.output import Output, table
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report.progress import Clock, ProgressEstimate, count_failed

COLUMNS = ("#ROUND", "#TRY", "KIND", "PHASE", "#MERGED", "#LATE", "#FAILED", "#TOOK", "#CLOCK", "METRICS")
LINE_EVERY_S = 1.0
Event = TypeVar("Event")


def showing(
    output: Output, board: ProgressEstimate
) -> contextlib.AbstractContextManager[Callable[[AttemptResult], None]]:
    """Show progress on stderr, or nothing with JSON; yield the callback for ended attempts."""
    return show_live(output, board.add, lambda: picture(board, output), lambda: _lines(output, board))


@contextlib.contextmanager
def show_live(
    output: Output,
    add: Callable[[Event], None],
    render: Callable[[], Group],
    make_lines: Callable[[], Callable[[Event], None]],
) -> Generator[Callable[[Event], None]]:
    """Show a live picture on a terminal, nothing with JSON, and otherwise lines; yield the callback for events.

    `add` adds an event to what `render` draws; `make_lines` returns a callback that adds it and prints lines.
    """
    if output.as_json:
        yield add
    elif output.messages.is_terminal and not output.messages.is_dumb_terminal:
        with Live(console=output.messages, refresh_per_second=4, get_renderable=render):
            yield add
    else:
        yield make_lines()


def picture(board: ProgressEstimate, output: Output) -> Group:
    """Render the latest attempts, as many as fit, above a progress bar over the rounds."""
    shown = list(board.latest)[-max(1, output.messages.height - 4) :]
    bar = Table.grid(padding=(0, 2))
    done = min(board.round, board.num_rounds)
    bar.add_row(
        Text(formats.printable(board.name), style="bold"),
        ProgressBar(total=max(1, board.num_rounds), completed=done, width=24),
        Text(board.sentence(), no_wrap=True, overflow="ellipsis"),
    )
    return Group(table(COLUMNS, [row(record) for record in shown]), bar)


def row(record: AttemptResult) -> tuple[str, ...]:
    """Return an attempt's cells, in the order of `COLUMNS`."""
    return (
        str(record.round),
        str(record.attempt),
        record.kind.lower(),
        record.phase.lower(),
        str(record.counts.get("MERGED", 0)),
        str(record.counts.get("LATE", 0)),
        str(count_failed(record.counts)),
        formats.duration(record.ended_at - record.opened_at),
        formats.duration(record.ended_at),
        formats.metrics(record.metrics, record.evaluation) or record.reason,
    )


def _lines(output: Output, board: ProgressEstimate, clock: Clock = time.monotonic) -> Callable[[AttemptResult], None]:
    """Print a line for the last round, and for others if the last line is at least `LINE_EVERY_S` old."""
    shown_at = -LINE_EVERY_S

    def add(record: AttemptResult) -> None:
        nonlocal shown_at
        board.add(record)
        now = clock()
        if now - shown_at >= LINE_EVERY_S or board.round >= board.num_rounds:
            shown_at = now
            output.note(board.sentence())

    return add
