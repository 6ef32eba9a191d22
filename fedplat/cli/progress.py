"""The progress of a running simulation: a live table on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Generator, Mapping

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedplat.cli import formats
from fedplat.cli.output import Output, table
from fedplat.metrics import is_smaller_better
from fedplat.simulation.recording.result import AttemptResult

COLUMNS = ("#ROUND", "#TRY", "KIND", "PHASE", "#MERGED", "#LATE", "#FAILED", "#TOOK", "#CLOCK", "METRICS")
LINE_EVERY_S = 1.0
_KEPT = 100

Clock = Callable[[], float]


class ProgressEstimate:
    """The progress of a running simulation. `clock` is real time; all other times are virtual."""

    def __init__(self, name: str, num_rounds: int, metric: str, clock: Clock) -> None:
        self.name, self.num_rounds, self.metric = name, num_rounds, metric
        self.latest: collections.deque[AttemptResult] = collections.deque(maxlen=_KEPT)
        self.round = self.merged = self.late = self.failed = 0
        self.now_s = 0.0
        self.best: float | None = None
        self._clock = clock
        self._began_at, self._began_with = clock(), (0, 0)

    def begin(self) -> None:
        """Start measuring the speed; the attempts added so far were computed by an earlier run."""
        self._began_at, self._began_with = self._clock(), (self.round, self.merged)

    def add(self, record: AttemptResult) -> None:
        """Add an attempt that has ended."""
        self.latest.append(record)
        self.now_s = record.ended_at
        self.merged += record.counts.get("MERGED", 0)
        self.late += record.counts.get("LATE", 0)
        self.failed += _count_failed(record.counts)
        if record.kind == "TRAIN" and record.committed:
            self.round = record.round
        value = record.evaluation.get(self.metric)
        if value is not None:
            better = min if is_smaller_better(self.metric) else max
            self.best = value if self.best is None else better(self.best, value)

    def speed(self) -> float:
        """Return the client updates per second of real time."""
        seconds = self._clock() - self._began_at
        return (self.merged - self._began_with[1]) / seconds if seconds > 0.0 else 0.0

    def left_s(self) -> float:
        """Estimate the real seconds until the last round, at the pace since `begin`; infinite before a round ends."""
        done = self.round - self._began_with[0]
        return (self._clock() - self._began_at) / done * (self.num_rounds - self.round) if done else float("inf")

    def sentence(self) -> str:
        """Summarize the progress in one line."""
        parts = [f"{self.round}/{self.num_rounds} rounds", f"virtual {formats.duration(self.now_s)}"]
        if self.best is not None:
            parts.append(f"best {self.metric} {self.best:.4g}")
        parts.append(f"{self.merged} merged, {self.late} late, {self.failed} failed")
        parts.append(f"{self.speed():.3g} updates/s")
        if self.round < self.num_rounds:
            parts.append(f"{formats.duration(self.left_s())} left")
        return "  ".join(parts)


@contextlib.contextmanager
def showing(output: Output, board: ProgressEstimate) -> Generator[Callable[[AttemptResult], None]]:
    """Show progress on stderr, or nothing with JSON; yield the callback for ended attempts."""
    if output.as_json:
        yield board.add
    elif output.messages.is_terminal and not output.messages.is_dumb_terminal:
        with Live(console=output.messages, refresh_per_second=4, get_renderable=lambda: picture(board, output)):
            yield board.add
    else:
        yield _lines(output, board)


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
        str(_count_failed(record.counts)),
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


def _count_failed(counts: Mapping[str, int]) -> int:
    return counts.get("FAILED", 0) + counts.get("REJECTED", 0)
