"""The progress of clients with their open assignments: when they had the model, and their last heartbeats.

It is kept in memory only, since thousands of clients send heartbeats. After a restart it is unknown until the next one.

A transaction for each client would cost as much as its report. So the times are collected in memory and stored in one
transaction at most once a second. A crash may lose the times of the last second; counts therefore include clients that
have come further. For the same reason the time of a client that reports within that second is not stored at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from fedplat.rounds import Assignment, AssignmentId, Attempt, AttemptKey, Change, JobState
from fedplat.rounds.protocols.base import PhaseProgress, protocol_of
from fedplat.rounds.states import AssignmentState
from fedplat_server import errors, logs


@dataclasses.dataclass(frozen=True, slots=True)
class ProgressSummary:
    """The progress of an attempt's clients: fractions of the work, 0 to 1, of those that train and sent a heartbeat.

    `median` and `minimum` are None, and `slowest_client_id` is empty, while no such client is known. Of several clients
    with the least fraction the slowest is the one that began first. `step` is that of a secure aggregation, or of the
    exchange of a decentralised job.
    """

    num_training: int
    num_uploading: int
    num_known: int = 0
    median: float | None = None
    minimum: float | None = None
    slowest_client_id: str = ""
    step: PhaseProgress | None = None


class ProgressTracker:
    """The last fraction that each open assignment's client sent.

    A heartbeat and the end of an assignment cost one look-up, a summary one pass over the open assignments.
    """

    def __init__(self) -> None:
        # With the hash of the assignment's token: a restarted client has a new token and starts again.
        self._fractions: dict[tuple[AttemptKey, str], tuple[bytes, float]] = {}
        self._overdue: dict[str, tuple[str, float]] = {}

    def record(self, assignment: Assignment, fraction: float) -> None:
        """Store the fraction of a heartbeat."""
        self._fractions[assignment.key, assignment.client_id] = (assignment.token_hash, fraction)

    def get(self, assignment: Assignment) -> float | None:
        """Return the fraction of the work that is done; None before the first heartbeat."""
        token_hash, fraction = self._fractions.get((assignment.key, assignment.client_id), (b"", None))
        return fraction if token_hash == assignment.token_hash else None

    def record_overdue(self, client_id: str, job_id: str, until: float) -> None:
        """Store that a client still works for a job although its assignment has ended; forget it at a time."""
        self._overdue[client_id] = (job_id, until)

    def find_overdue(self, client_id: str, now: float) -> str:
        """Return the job for which a client still works although its assignment has ended; "" if it does not."""
        job_id, until = self._overdue.get(client_id, ("", now))
        if until <= now:
            self._overdue.pop(client_id, None)
            return ""
        return job_id

    def drop_overdue(self, client_id: str) -> None:
        """Forget that a client works although its assignment has ended: it has checked in."""
        self._overdue.pop(client_id, None)

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Forget the assignments that stored changes have ended."""
        for change in changes:
            for assignment in change.assignments:
                if not assignment.is_busy:
                    self._fractions.pop((assignment.key, assignment.client_id), None)

    def summarize(self, job: JobState, attempt: Attempt) -> ProgressSummary | None:
        """Return the progress of the clients of a job's open attempt; None if the attempt waits for none."""
        step = protocol_of(job, attempt.kind).count_phase(job, attempt)
        if not attempt.num_busy and step is None:
            return None
        training = [each for each in attempt.busy if each.state is AssignmentState.TRAINING]
        known = [
            (fraction, each.assigned_at, each.client_id)
            for each in training
            if (fraction := self.get(each)) is not None
        ]
        num_uploading = attempt.counts.get(AssignmentState.UPLOADING, 0)
        summary = ProgressSummary(len(training), num_uploading, len(known), step=step)
        if not known:
            return summary
        median = statistics.median(fraction for fraction, _, _ in known)
        minimum, _, slowest = min(known)
        return dataclasses.replace(summary, median=median, minimum=minimum, slowest_client_id=slowest)


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
            except errors.LeadershipLostError:
                return
            except errors.StoreError as exc:
                logs.get().warning("times of downloads could not be stored", clients=len(batch), error=str(exc))

    async def _run(self) -> None:
        while self._pending:
            await asyncio.sleep(self._interval_s)
            await self.flush()
        self._task = None
