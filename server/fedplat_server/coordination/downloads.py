"""The times at which clients had the model of their assignment: written in batches, behind the rounds.

A transaction for each client would cost as much as its report. So the times are collected in memory and stored in one
transaction at most once a second. A crash may lose the times of the last second; counts therefore include clients that
have come further. For the same reason the time of a client that reports within that second is not stored at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from fedplat.rounds import AssignmentId, Change
from fedplat.rounds.states import AssignmentState
from fedplat_server import logs
from fedplat_server.errors import LeadershipLostError, StoreError

INTERVAL_S = 1.0
"""Minimum interval between two transactions."""
BATCH = 1000
"""Maximum number of times in one transaction."""
_FURTHER = frozenset(
    {
        AssignmentState.ADVERTISED,
        AssignmentState.SHARED,
        AssignmentState.UPLOADING,
        AssignmentState.REPORTED,
        AssignmentState.MERGED,
    }
)
"""States that a client reaches only with the model."""


class DownloadStore(Protocol):
    """The part of `AssignmentStore` that stores the times."""

    async def record_downloads(self, downloaded_unix_s: Mapping[AssignmentId, float]) -> None:
        """Store the times at which clients had the model; the first time is kept."""
        ...


class Downloads:
    """The times that are not stored yet, and the task that stores them while there are some."""

    def __init__(
        self, store: DownloadStore, interval_s: float = INTERVAL_S, now_unix_s: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._interval_s = interval_s
        self._now_unix_s = now_unix_s
        self._pending: dict[AssignmentId, float] = {}
        self._known: set[AssignmentId] = set()
        self._task: asyncio.Task[None] | None = None

    def record(self, assignment_id: AssignmentId) -> None:
        """Record that a client has the model now; only its first call counts."""
        if assignment_id in self._known:
            return
        self._known.add(assignment_id)
        self._pending[assignment_id] = self._now_unix_s()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="downloads")

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Forget ended assignments, and the times of clients that have come further, according to stored changes."""
        if not self._known:
            return
        for change in changes:
            for assignment in change.assignments:
                if assignment.state in _FURTHER:
                    self._pending.pop(assignment.id, None)
                if not assignment.is_busy:
                    self._known.discard(assignment.id)

    async def close(self) -> None:
        """Stop the task, and store the remaining times."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()

    async def flush(self) -> None:
        """Store the times that were recorded so far. If the database does not answer, they are lost."""
        while self._pending:
            batch = dict(list(self._pending.items())[:BATCH])
            for assignment_id in batch:
                del self._pending[assignment_id]
            try:
                await self._store.record_downloads(batch)
            except LeadershipLostError:
                return
            except StoreError as exc:
                logs.get().warning("times of downloads could not be stored", clients=len(batch), error=str(exc))

    async def _run(self) -> None:
        while self._pending:
            await asyncio.sleep(self._interval_s)
            await self.flush()
        self._task = None
