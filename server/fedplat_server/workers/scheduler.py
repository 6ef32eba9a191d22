"""The scheduler of rank 0, and its tasks, which can be suspended: the order of new events and of resumed tasks.

So a rank can have several open tasks, such as the attempts of several jobs that collect reports, and never runs two at
once: all ranks do the same steps in the same order, as collectives require. A long task pauses for other tasks whenever
it reports its progress.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from fedplat_server.workers.broadcast import TaskEvent


class TurnScheduler:
    """Returns new events and events that resume paused tasks, alternating between them."""

    def __init__(self, arriving: SimpleQueue[TaskEvent]) -> None:
        self._arriving = arriving
        self._ready: deque[TaskEvent] = deque()
        self._held: dict[int, deque[TaskEvent]] = {}
        self._resumed_last = False

    def next(self) -> TaskEvent:
        """Return the next event; wait for one if no task can continue. Messages for a paused task are queued."""
        while True:
            if self._ready and (self._arriving.empty() or not self._resumed_last):
                self._resumed_last = True
                return self._ready.popleft()
            event = self._arriving.get()
            if event.task in self._held and event.kind in ("message", "end"):
                self._held[event.task].append(event)
                continue
            if event.kind == "cancel":
                self._forget(event.task)
            self._resumed_last = False
            return event

    def record(self, task: int, outcome: bytes | Pause) -> None:
        """Record the outcome of a task's step: its result, or why it is suspended."""
        if outcome is Pause.YIELDED:
            self._held.setdefault(task, deque())
            self._ready.append(TaskEvent(task, "resume"))
        elif outcome is Pause.WAITING and self._held.get(task):
            self._ready.append(self._held[task].popleft())
        else:
            self._forget(task)

    def _forget(self, task: int) -> None:
        """Drop the queued events of a task that has ended, or that waits for a message."""
        self._held.pop(task, None)
        self._ready = deque(event for event in self._ready if event.task != task)


class TaskCancelledError(Exception):
    """The task was cancelled; raised where it waits for its next message, or pauses."""


class Pause(enum.Enum):
    """The reason why a task is suspended: it waits for its next message, or paused for other tasks."""

    WAITING = enum.auto()
    YIELDED = enum.auto()


class ThreadCoroutine:
    """One open task. Each step returns the task's result if it ended, else a `Pause`, and raises the task's errors.

    A step ends when the task waits for a message, calls `pause`, or ends.
    """

    def __init__(self, name: str, run: Callable[[Iterator[bytes]], bytes]) -> None:
        self._run = run
        self._inputs: SimpleQueue[bytes | Pause | TaskCancelledError | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Pause | bytes | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def start(self) -> bytes | Pause:
        """Run the first step."""
        self._thread.start()
        return self._wait()

    def send(self, message: bytes) -> bytes | Pause:
        """Continue with the message that the task waits for."""
        return self._continue(message)

    def end(self) -> bytes | Pause:
        """Continue a task that waits for a message: there are no more."""
        return self._continue(None)

    def resume(self) -> bytes | Pause:
        """Continue after `pause`."""
        return self._continue(Pause.YIELDED)

    def pause(self) -> None:
        """Let other tasks run; the task's thread calls this. Raises `TaskCancelledError` if the task was cancelled."""
        self._outcomes.put(Pause.YIELDED)
        if isinstance(command := self._inputs.get(), TaskCancelledError):
            raise command

    def cancel(self) -> None:
        """Raise `TaskCancelledError` in the suspended task, and wait for its end. Raises the task's other errors."""
        self._inputs.put(TaskCancelledError())
        try:
            self._wait()
        except TaskCancelledError:
            return

    def _continue(self, command: bytes | Pause | None) -> bytes | Pause:
        self._inputs.put(command)
        return self._wait()

    def _wait(self) -> bytes | Pause:
        outcome = self._outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _work(self) -> None:
        try:
            result = self._run(self._messages())
        except BaseException as exc:  # `_wait` raises it in the rank's thread
            self._outcomes.put(exc)
        else:
            self._outcomes.put(result)

    def _messages(self) -> Iterator[bytes]:
        while True:
            self._outcomes.put(Pause.WAITING)
            message = self._inputs.get()
            if isinstance(message, TaskCancelledError):
                raise message
            if not isinstance(message, bytes):
                return
            yield message
