"""The scheduler of rank 0: decides in which order all ranks handle new events and resume paused tasks."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue

from fedplat_server.workers.broadcast import TaskEvent
from fedplat_server.workers.coroutine import Pause


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
