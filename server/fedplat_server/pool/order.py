"""What all ranks do next, as rank 0 decides it: what comes, and in between the works that let others have a turn."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue

from fedplat_server.pool.events import Event
from fedplat_server.pool.tasks import Pause


class Order:
    """Draws the next event of those that come, and of those that works need to go on."""

    def __init__(self, coming: SimpleQueue[Event]) -> None:
        self._coming = coming
        self._ready: deque[Event] = deque()
        self._held: dict[int, deque[Event]] = {}
        self._was_ready = False

    def next(self) -> Event:
        """The next event; waits for one if no work can go on. What its work does not wait for yet is held back."""
        while True:
            if self._ready and (self._coming.empty() or not self._was_ready):
                self._was_ready = True
                return self._ready.popleft()
            event = self._coming.get()
            if event.work in self._held and event.kind in ("message", "end"):
                self._held[event.work].append(event)
                continue
            if event.kind == "cancel":
                self._forget(event.work)
            self._was_ready = False
            return event

    def went(self, work: int, outcome: bytes | Pause) -> None:
        """Notes how a work's step has ended."""
        if outcome is Pause.YIELDS:
            self._held.setdefault(work, deque())
            self._ready.append(Event(work, "resume"))
        elif outcome is Pause.WAITS and self._held.get(work):
            self._ready.append(self._held[work].popleft())
        else:
            self._forget(work)

    def _forget(self, work: int) -> None:
        """A work has ended, or waits for what has not come yet."""
        self._held.pop(work, None)
        self._ready = deque(event for event in self._ready if event.work != work)
