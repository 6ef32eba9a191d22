"""The progress of a sweep: a live table of runs in progress on a terminal, otherwise a line for each finished run."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedplat.cli import formats
from fedplat.cli.output import Output, table
from fedplat.cli.progress import show_live
from fedplat.sweep import StepProgress, SweepFile
from fedplat.sweep.schedule import RunKey

Clock = Callable[[], float]


class SweepBoard:
    """The progress of a sweep. `clock` is real time."""

    def __init__(self, file: SweepFile, clock: Clock) -> None:
        self.running: dict[RunKey, StepProgress] = {}
        self.num_done, self.num_runs = 0, file.num_runs
        self.best: float | None = None
        self._file, self._clock = file, clock
        self._began: tuple[float, int] | None = None

    def add(self, progress: StepProgress) -> None:
        """Add the progress of a run."""
        if progress.is_stored:
            self._began = None
        elif self._began is None:
            self._began = self._clock(), self.num_done
        self.num_done, self.num_runs = progress.num_done, progress.num_runs
        if progress.is_done:
            self.running.pop(progress.step.key, None)
        else:
            self.running[progress.step.key] = progress
        order = self._file.objective.order
        if progress.is_done and progress.value is not None and order(progress.value) > order(self.best):
            self.best = progress.value

    def left_s(self) -> float:
        """Estimate the real seconds until the end, at the pace so far; infinite before a run has ended."""
        done = self.num_done - self._began[1] if self._began is not None else 0
        if self._began is None or not done:
            return math.inf
        return (self._clock() - self._began[0]) / done * (self.num_runs - self.num_done)

    def sentence(self) -> str:
        """Summarize the progress in one line."""
        parts = [f"{self.num_done}/{self.num_runs} runs"]
        if self.best is not None:
            parts.append(f"best {self._file.objective.metric} {self.best:.4g}")
        if self.num_done < self.num_runs and math.isfinite(self.left_s()):
            parts.append(f"{formats.duration(self.left_s())} left")
        return "  ".join(parts)

    def describe(self, progress: StepProgress) -> str:
        """Describe a run in one line."""
        values = self._file.describe(progress.step.configuration)
        value = "" if progress.value is None else f"  {self._file.objective.metric} {progress.value:.4g}"
        return f"{values}, seed {progress.step.seed}: round {progress.round}/{progress.num_rounds}{value}"

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the runs in progress."""
        return [
            (
                str(key.configuration),
                str(key.seed),
                f"{progress.round}/{progress.num_rounds}",
                formats.NOTHING if progress.value is None else f"{progress.value:.4f}",
                self._file.describe(progress.step.configuration),
            )
            for key, progress in sorted(self.running.items())
        ]


def showing(output: Output, board: SweepBoard) -> AbstractContextManager[Callable[[StepProgress], None]]:
    """Show progress on stderr, or nothing with JSON; yield the callback for the progress of runs."""
    return show_live(output, board.add, lambda: picture(board, output), lambda: _lines(output, board))


def picture(board: SweepBoard, output: Output) -> Group:
    """Render the runs in progress, as many as fit, above a progress bar over all runs."""
    columns = ("#NUMBER", "#SEED", "#ROUND", "#VALUE", "CONFIGURATION")
    shown = board.rows()[: max(1, output.messages.height - 4)]
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        ProgressBar(total=max(1, board.num_runs), completed=board.num_done, width=24),
        Text(board.sentence(), no_wrap=True, overflow="ellipsis"),
    )
    return Group(table(columns, shown), bar)


def _lines(output: Output, board: SweepBoard) -> Callable[[StepProgress], None]:
    """Print a line for each run that reaches a rung or its end; for those of an earlier process only one."""
    num_stored = 0

    def add(progress: StepProgress) -> None:
        nonlocal num_stored
        board.add(progress)
        if progress.is_stored:
            num_stored += not progress.step.until
            return
        if num_stored:
            output.note(f"{num_stored} of {board.num_runs} runs are finished already")
            num_stored = 0
        if progress.is_done:
            output.note(f"{board.sentence()}  {board.describe(progress)}")

    return add
