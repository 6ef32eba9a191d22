"""The progress of a running simulation: one live line on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedplat.cli import formats
from fedplat.cli.output import Output
from fedplat.simulation.recording.result import AttemptResult
from fedplat.simulation.report.progress import Clock, ProgressEstimate

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between lines without a terminal: the pauses grow, so that a log of hours stays short."""
_PAUSE_GROWTH = 1.2
_NAME_WIDTH, _BAR_WIDTH = 24, 12
_BAR_FROM_WIDTH = 70
"""A narrower terminal has no room for the bar."""
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
    """Render the progress as one line that fits the terminal: a bar, and as many numbers as there is room for."""
    width = output.messages.width - 1
    name = formats.printable(board.name)
    if cell_len(name) > _NAME_WIDTH:
        name = set_cell_size(name, _NAME_WIDTH - 3).rstrip() + "..."
    rounds = f"{board.round}/{board.num_rounds}"
    cells: list[Text | ProgressBar] = [Text(name, style="bold"), Text(rounds)]
    used = cell_len(name) + len(rounds) + 2 * 2
    if width >= _BAR_FROM_WIDTH:
        done = min(board.round, board.num_rounds)
        cells.insert(1, ProgressBar(total=max(1, board.num_rounds), completed=done, width=_BAR_WIDTH))
        used += _BAR_WIDTH + 2
    line = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(len(cells) + 1):
        line.add_column(no_wrap=True)
    line.add_row(*cells, Text("  ".join(fit(numbers(board), width - used)), overflow="ellipsis"))
    return Group(line)


def numbers(board: ProgressEstimate) -> list[tuple[int, str]]:
    """Return the numbers of the line in their order, each with its rank: 0 for the most important one."""
    found = [(0, f"{name} {value:.4g}") for name, value in board.score.items()]
    if board.best is not None:
        found.append((3, f"best {board.best:.4g}"))
    found.append((2, f"{board.speed():.3g} clients/s"))
    if math.isfinite(board.left_s()) and board.round < board.num_rounds:
        found.append((1, f"{formats.duration(board.left_s())} left"))
    else:
        found.append((1, f"{formats.duration(board.elapsed_s())} so far"))
    if lost := board.late + board.failed:
        found.append((4, f"{lost:,} lost"))
    found.append((5, f"virtual {formats.duration(board.now_s)}"))
    return found


def fit(ranked: Sequence[tuple[int, str]], width: int) -> list[str]:
    """Return the texts that fit a width when they are joined by two spaces, dropping the least important ones."""
    kept = list(ranked)
    while kept and sum(cell_len(text) + 2 for _, text in kept) - 2 > width:
        kept.remove(max(kept))
    return [text for _, text in kept]


def _lines(output: Output, board: ProgressEstimate, clock: Clock = time.monotonic) -> Callable[[AttemptResult], None]:
    """Print a line for the last round, and for others after a pause that grows from line to line."""
    due_at, pause_s = -math.inf, FIRST_PAUSE_S

    def add(record: AttemptResult) -> None:
        nonlocal due_at, pause_s
        board.add(record)
        now = clock()
        if now >= due_at or (board.round >= board.num_rounds and record.kind == "TRAIN"):
            due_at, pause_s = now + pause_s, min(LONGEST_PAUSE_S, pause_s * _PAUSE_GROWTH)
            output.note(board.sentence())

    return add
