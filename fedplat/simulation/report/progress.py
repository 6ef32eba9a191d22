"""The progress of a running simulation: estimates, and a bar on a terminal or in a notebook."""

from __future__ import annotations

import collections
import contextlib
import html
import sys
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal

from fedplat import metrics, texts
from fedplat.simulation.recording.result import AttemptResult

Clock = Callable[[], float]
ShowProgress = bool | Literal["auto"]
"""True, or "auto": only on a terminal and in a notebook."""
_KEPT = 100
_EVERY_S = 0.25
"""Seconds between updates of a notebook's bar."""


class ProgressEstimate:
    """The progress of a running simulation. `clock` is real time; all other times are virtual."""

    def __init__(self, name: str, num_rounds: int, metric: str, clock: Clock) -> None:
        self.name, self.num_rounds, self.metric = name, num_rounds, metric
        self.latest: collections.deque[AttemptResult] = collections.deque(maxlen=_KEPT)
        self.round = self.merged = self.late = self.failed = 0
        self.now_s = 0.0
        self.best: float | None = None
        self.score: dict[str, float] = {}
        """The value of the metric at the latest evaluation or, until there is one, the loss of the clients."""
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
        self.failed += count_failed(record.counts)
        if record.kind == "TRAIN" and record.committed:
            self.round = record.round
        value = record.evaluation.get(self.metric)
        if value is not None:
            self.score = {self.metric: value}
        elif self.best is None and "loss" in record.metrics:
            self.score = {"loss": record.metrics["loss"]}
        if value is not None:
            better = min if metrics.is_smaller_better(self.metric) else max
            self.best = value if self.best is None else better(self.best, value)

    def elapsed_s(self) -> float:
        """Return the real seconds since `begin`."""
        return self._clock() - self._began_at

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
        parts = [f"{self.round}/{self.num_rounds} rounds", f"virtual {texts.duration(self.now_s)}"]
        if self.best is not None:
            parts.append(f"best {self.metric} {self.best:.4g}")
        parts.append(f"{self.merged} merged, {self.late} late, {self.failed} failed")
        parts.append(f"{self.speed():.3g} updates/s")
        if self.round < self.num_rounds:
            parts.append(f"{texts.duration(self.left_s())} left")
        return "  ".join(parts)


@contextlib.contextmanager
def show_bar(
    estimate: ProgressEstimate, show: ShowProgress, clock: Clock
) -> Generator[Callable[[AttemptResult], None]]:
    """Show a progress bar within the block; yield the callback for ended attempts.

    It is written to stderr with the package rich; without rich, nothing is shown.
    """
    with contextlib.ExitStack() as stack:
        update: Callable[[], object] | None = None
        if show and _in_notebook():
            update = _open_notebook_bar(estimate, clock, stack)
        elif show is True or (show == "auto" and sys.stderr.isatty()):
            with contextlib.suppress(ModuleNotFoundError):
                update = _open_terminal_bar(estimate, stack)

        def add(record: AttemptResult) -> None:
            estimate.add(record)
            if update is not None:
                update()

        yield add


def _open_terminal_bar(estimate: ProgressEstimate, stack: contextlib.ExitStack) -> Callable[[], object]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.fields[job]}", markup=False),
        BarColumn(24),
        TextColumn("{task.description}", markup=False),
    )
    bar = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
    task = bar.add_task(estimate.sentence(), total=max(1, estimate.num_rounds), job=texts.shorten(estimate.name))
    return lambda: bar.update(task, completed=estimate.round, description=texts.shorten(estimate.sentence()))


def _in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, which can display HTML."""
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _open_notebook_bar(estimate: ProgressEstimate, clock: Clock, stack: contextlib.ExitStack) -> Callable[[], object]:
    from IPython.display import display  # pyright: ignore[reportUnknownVariableType]

    def content() -> dict[str, str]:
        text = f"{estimate.name}: {estimate.sentence()}"
        bar = f'<progress value="{estimate.round}" max="{max(1, estimate.num_rounds)}"></progress>'
        return {"text/plain": text, "text/html": f"{bar} {html.escape(text)}"}

    handle: Any = display(content(), raw=True, display_id=True)
    shown_at = clock()

    def update() -> None:
        nonlocal shown_at
        if clock() - shown_at >= _EVERY_S:
            shown_at = clock()
            handle.update(content(), raw=True)

    stack.callback(lambda: handle.update(content(), raw=True))
    return update


def count_failed(counts: Mapping[str, int]) -> int:
    """Return the number of assignments that ended with an error or were rejected."""
    return counts.get("FAILED", 0) + counts.get("REJECTED", 0)
