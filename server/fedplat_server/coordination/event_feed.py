"""The feed of new events for watchers, who share one copy of the latest ones in memory.

A watcher only keeps the number of the last event that it has seen. One that is further behind than the feed reads the
database itself, a page at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Generator, Sequence

from fedplat_server import errors, logs
from fedplat_server.database.sql_events import EventStore
from fedplat_server.records.events import EventRow

POLL_S = 2.0
"""Interval in which the feed looks for events that it was not notified of: those of other processes."""
NUM_KEPT = 1000
PAGE = 250


class EventFeed:
    """The latest events. It reads the database only while there are watchers."""

    def __init__(self, events: EventStore, poll_s: float = POLL_S) -> None:
        self._events = events
        self._poll_s = poll_s
        self._kept: deque[EventRow] = deque(maxlen=NUM_KEPT)
        self._changed = asyncio.Event()
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def watch(self) -> Generator[None]:
        """Keep the feed running for a watcher."""
        self._num_watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="event feed")
        try:
            yield
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._task.cancel()
                self._task = None
                self._kept.clear()

    def next_change(self) -> asyncio.Event:
        """Return an event that is set when there are new events, or when the watchers must end."""
        return self._changed

    async def read_after(self, sequence: int) -> Sequence[EventRow]:
        """Return some events after a number; an empty list if there is no new one."""
        if self._kept and self._kept[0].sequence <= sequence + 1:
            start = sequence + 1 - self._kept[0].sequence
            return list(self._kept)[start : start + PAGE]
        return await self._events.list_events(sequence, limit=PAGE)

    def wake(self) -> None:
        """Wake all watchers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def close(self) -> None:
        """End the task, whose watchers have ended or are being cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        last = None
        while True:
            appended = self._events.next_append()
            try:
                last, found = await self._read(last)
            except errors.LeadershipLostError:
                return  # the daemon ends the calls of all watchers
            except errors.StoreError as exc:
                logs.get().warning("watchers of events wait for the database", error=str(exc))
                found = []
            if found:
                self._kept.extend(found)
                self.wake()
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(appended.wait(), self._poll_s)

    async def _read(self, last: int | None) -> tuple[int, Sequence[EventRow]]:
        """Return the number of the last event that is known, and the events after the one known before."""
        if last is None:
            last = await self._events.find_last_sequence()
            self.wake()  # watchers read the events before this one themselves
            return last, []
        found = await self._events.list_events(last, limit=PAGE)
        return found[-1].sequence if found else last, found
