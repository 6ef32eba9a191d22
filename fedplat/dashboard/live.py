"""Live updates: one watch for each job that pages show, whatever the number of pages.

A page's stream waits for a change (`Listener.wait`), then renders its page again and sends the parts that differ. The
rendering uses the session's own token. The watch only wakes the streams; it uses the token of one of the sessions that
listen, and continues with another one's if that operator is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator

from fedplat.dashboard.source import PageSource, Watch
from fedplat.errors import FedplatError
from fedplat.web.sessions import BrowserSession

MAX_WATCHES = 64
"""Jobs that are watched at a time; the pages of others are refreshed every `TICK_S`."""
TICK_S = 2.0
"""A page is refreshed at least this often: its times and the server's status."""
_RETRY_S = 1.0


class Listener:
    """The changes that one stream waits for."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Report a change."""
        self._changed.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when something has changed since the last call, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        self._changed.clear()


class _JobWatch:
    """A thread that watches a job, and the listeners that it wakes."""

    def __init__(self, job: str, loop: asyncio.AbstractEventLoop) -> None:
        self.listeners: dict[Listener, BrowserSession[PageSource]] = {}
        self.version = 0
        self._job, self._loop = job, loop
        self._lock = threading.Lock()
        self._current: Watch | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {job}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """End the thread, without waiting for it."""
        self._ended.set()
        with self._lock:
            current = self._current
        if current is not None:
            current.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            sessions = list(self.listeners.values())
            if sessions:
                with contextlib.suppress(FedplatError):
                    self._watch(sessions[-1])
            self._wake()
            self._ended.wait(_RETRY_S)

    def _watch(self, session: BrowserSession[PageSource]) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            watch = self._current = session.source.watch(self._job)
        try:
            for _ in watch.changes():
                self._wake()
        finally:
            watch.close()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the app has ended
            self._loop.call_soon_threadsafe(self._wake_listeners)

    def _wake_listeners(self) -> None:
        self.version += 1
        for listener in self.listeners:
            listener.wake()


class LiveUpdates:
    """The watches of all jobs that pages show now, and the event that ends all streams."""

    def __init__(self) -> None:
        self._watches: dict[str, _JobWatch] = {}
        self._stopping = asyncio.Event()
        self._listeners: set[Listener] = set()

    @property
    def is_stopping(self) -> bool:
        """True once `stop` was called."""
        return self._stopping.is_set()

    @property
    def num_watches(self) -> int:
        """The number of jobs that are watched now."""
        return len(self._watches)

    def stop(self) -> None:
        """End all streams and watches."""
        self._stopping.set()
        for listener in self._listeners:
            listener.wake()
        for watch in self._watches.values():
            watch.end()

    @contextlib.asynccontextmanager
    async def listen(self, session: BrowserSession[PageSource], job: str) -> AsyncGenerator[Listener]:
        """Yield a listener for the changes of a job; without a job, it is only woken by `stop`."""
        listener = Listener()
        self._listeners.add(listener)
        watch = self._join(job, listener, session) if job else None
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            if watch is not None:
                del watch.listeners[listener]
                if not watch.listeners:
                    del self._watches[job]
                    watch.end()

    def version(self, job: str) -> int:
        """Return the number of changes of a job that its watch has seen."""
        watch = self._watches.get(job)
        return watch.version if watch is not None else 0

    def _join(self, job: str, listener: Listener, session: BrowserSession[PageSource]) -> _JobWatch | None:
        watch = self._watches.get(job)
        if watch is not None:
            watch.listeners[listener] = session
        elif len(self._watches) < MAX_WATCHES:
            watch = self._watches[job] = _JobWatch(job, asyncio.get_running_loop())
            watch.listeners[listener] = session
            watch.start()
        return watch
