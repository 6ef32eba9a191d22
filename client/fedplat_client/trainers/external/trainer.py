"""The loop that drives a program outside of this process, whatever starts it."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fedplat import texts
from fedplat.config import user_code
from fedplat_client.errors import Cancelled, ExternalTaskError, TaskLeftError
from fedplat_client.task import EvaluateResult, Task, TrainResult
from fedplat_client.trainers.external.folder import TaskFolder
from fedplat_client.trainers.external.launcher import Launcher, OuterProcess
from fedplat_client.trainers.external.root import TaskRoot

_SHORTEST_PAUSE_S = 0.01
_PAUSE_SHARE = 0.25
"""The next pause between two polls, over the time that the program has run: what ends late by a quarter is no loss."""
_KILLED_S = 10.0
"""How long a program may take to be gone after it was killed, before the log has a warning."""
_SHOWN_LOG_BYTES = 16 * 2**10
"""How much of what a program writes between two polls is shown in the client's log."""
_SHOWN_LINE_BYTES = 500
_Result = TypeVar("_Result", TrainResult, EvaluateResult)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class ExternalTrainer:
    """A trainer and an evaluator that is a program outside of this process.

    The folder of the task is written for it; its progress, its log and its result are read from there. If the task must
    end, the program finds the file `stop`, gets SIGTERM after half of `stop_grace_s`, and SIGKILL `stop_grace_s` later.
    Raises `ExternalTaskError` if the program fails, or returns what cannot be used.
    """

    launcher: Launcher
    root: TaskRoot
    stop_grace_s: float = 10.0

    def __call__(self, task: Task) -> TrainResult:
        """Train."""
        return self._run(task, lambda folder: folder.read_training(task), evaluates=False)

    def evaluate(self, task: Task) -> EvaluateResult:
        """Evaluate."""
        return self._run(task, lambda folder: folder.read_evaluation(), evaluates=True)

    def _run(self, task: Task, read: Callable[[TaskFolder], _Result], *, evaluates: bool) -> _Result:
        folder = self.root.find(_name_task(task, evaluates=evaluates))
        outer = self.launcher.attach(folder) if folder.path.exists() else None
        if outer is not None:
            _logger.info("The task of an earlier process continues in %s.", folder.path)
        elif folder.has_result:
            with contextlib.suppress(ExternalTaskError):  # written by half, so the program runs again
                result = read(folder)
                _logger.info("The program has ended before this process began; its result is in %s.", folder.path)
                return result
        if outer is None:
            if folder.path.exists():
                self.launcher.end(folder)
                folder.remove()
            folder = TaskFolder.create(folder.path, task, evaluates=evaluates, kind=self.launcher.kind)
            outer = self.launcher.start(folder)
        try:
            self._accompany(task, folder, outer)
            return read(folder)
        except TaskLeftError:
            self.root.leave(folder)
            raise
        except BaseException as exc:
            if not user_code.is_interrupt(exc):
                self._stop(folder, outer, exc)
            self._end(folder, exc)
            raise

    def _accompany(self, task: Task, folder: TaskFolder, outer: OuterProcess) -> None:
        """Wait for the end of a program. Raises `ExternalTaskError`, `TaskLeftError` and what `task.progress` does."""
        watch = _Watch(task, folder)
        began = task.control.options.clock()
        while (problem := outer.poll()) is None:
            watch.look()
            if self.launcher.continues and task.control.options.leaves_tasks:
                raise TaskLeftError(f"the task continues in {folder.path}; run the same command again to report it")
            share_s = _PAUSE_SHARE * (task.control.options.clock() - began)
            pause_s = min(share_s, self.launcher.poll_s, task.remaining_s)
            task.control.signal.wait(max(pause_s, _SHORTEST_PAUSE_S))
        self.launcher.end(folder)  # what the program has started, and not ended
        watch.look()
        if problem:
            raise ExternalTaskError(f"the program says: {said}" if (said := folder.read_error()) else problem)

    def _stop(self, folder: TaskFolder, outer: OuterProcess, exc: BaseException) -> None:
        folder.request_stop(exc.reason if isinstance(exc, Cancelled) else "FAILED")
        for step, patience_s in (
            (lambda: None, self.stop_grace_s / 2),
            (lambda: outer.stop(force=False), self.stop_grace_s),
            (lambda: outer.stop(force=True), _KILLED_S),
        ):
            step()
            if _wait_for_end(outer, patience_s):
                return
        _logger.warning("The program of the task in %s does not end.", folder.path)

    def _end(self, folder: TaskFolder, exc: BaseException) -> None:
        """End what is left, and keep the log of a failure instead of the folder."""
        self.launcher.end(folder)
        if not isinstance(exc, Cancelled):
            with contextlib.suppress(OSError, ExternalTaskError):
                _logger.warning("The end of the program's log is in %s.", self.root.keep_log(folder))
        folder.remove()


class _Watch:
    """What is read from a task folder while its program runs."""

    def __init__(self, task: Task, folder: TaskFolder) -> None:
        self._task = task
        self._folder = folder
        self._position = 0
        self._begun = b""
        self._has_warned = False

    def look(self) -> None:
        """Take over the progress, and show the new lines of the log. Raises `Cancelled`, and `ExternalTaskError`."""
        self._show_log()
        try:
            fraction = self._folder.read_progress()
        except ValueError as exc:
            fraction = None
            if not self._has_warned:
                _logger.warning("The file progress is ignored: %s; expected a number from 0 to 1.", exc)
                self._has_warned = True
        self._task.progress(self._task.control.fraction if fraction is None else fraction)

    def _show_log(self) -> None:
        content, position = self._folder.read_log(self._position, _SHOWN_LOG_BYTES)
        if skipped := position - self._position - len(content):
            _logger.info("%s: (%s left out)", self._task.name, texts.format_count(skipped, "byte"))
            self._begun = b""
        self._position = position
        *lines, self._begun = (self._begun + content).split(b"\n")
        if len(self._begun) > _SHOWN_LOG_BYTES:
            lines, self._begun = [*lines, self._begun], b""
        for line in lines:
            text = texts.shorten(line.decode(errors="replace").rstrip(), _SHOWN_LINE_BYTES)
            _logger.info("%s: %s", self._task.name, text)


def _wait_for_end(outer: OuterProcess, patience_s: float) -> bool:
    pause, waited_s = threading.Event(), 0.0
    while True:
        with contextlib.suppress(ExternalTaskError):
            if outer.poll() is not None:
                return True
        if waited_s >= patience_s:
            return False
        pause_s = min(max(_PAUSE_SHARE * waited_s, _SHORTEST_PAUSE_S), patience_s - waited_s)
        pause.wait(pause_s)
        waited_s += pause_s


def _name_task(task: Task, *, evaluates: bool) -> str:
    """Return a name that only this task has, the same if the server gives the assignment again."""
    parts = (task.assignment_id, task.job_id, task.round, task.attempt, task.name, evaluates)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
