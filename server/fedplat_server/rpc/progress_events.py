"""The progress events of a watch, about the open attempt. They are not part of the job's history."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import NamedTuple

from fedplat.rounds import Attempt, Coordinator
from fedplat.rounds.states import AttemptPhase
from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination.progress import ProgressTracker
from fedplat_server.messages import convert
from fedplat_server.rpc.job_view import JobView

WAITING_AFTER_S = 3.0
"""A watch is told that an attempt waits for clients after this time, if its other events are more seldom."""


class ProgressParts(NamedTuple):
    """The parts that `ProgressEvents` uses."""

    coordinator: Coordinator
    progress: ProgressTracker
    view: JobView


class ProgressEvents:
    """The progress events of one watch of a job: at most one in `every_s` seconds; 0 disables them."""

    def __init__(self, job_id: str, every_s: float, parts: ProgressParts) -> None:
        self._parts = parts
        self._job_id = job_id
        self._every_s = every_s or math.inf
        self._clock = asyncio.get_running_loop().time
        now = self._clock()
        self._due_at = now + (min(every_s, WAITING_AFTER_S) or math.inf)
        self._progress_due_at = now + self._every_s
        self._last: tuple[object, object] | None = None

    def next_event(self, sequence: int) -> admin_pb2.JobEvent | None:
        """Return an event if one is due and the progress has changed; `sequence` is that of the previous event."""
        now = self._clock()
        if now < self._due_at:
            return None
        attempt = self._parts.coordinator.jobs[self._job_id].open_attempt
        is_waiting = attempt is not None and attempt.phase is AttemptPhase.SELECTING
        if not is_waiting and now < self._progress_due_at:
            self._due_at = self._progress_due_at
            return None
        self._due_at = self._progress_due_at = now + self._every_s
        if attempt is None:
            return None
        event = admin_pb2.JobEvent(
            sequence=sequence,
            unix_s=time.time(),
            entity="progress",
            round=attempt.key.round,
            attempt=attempt.key.number,
            kind=convert.KINDS[attempt.kind],
        )
        if (waits := self._parts.view.find_wait(attempt)) is not None:
            event.waiting.CopyFrom(waits)
        return self._describe_waiting(event, attempt) if is_waiting else self._add_progress(event, attempt)

    def _describe_waiting(self, event: admin_pb2.JobEvent, attempt: Attempt) -> admin_pb2.JobEvent | None:
        room = self._parts.coordinator.room
        if self._job_id not in room.demands:
            return None
        unlike = room.describe_unlike(self._job_id)
        event.reason = f"waits for clients: {room.num_eligible(self._job_id)} of {attempt.target} can be drawn now"
        event.reason += f"; {unlike}" if unlike else ""
        return event if self._is_new(attempt.key.round, event.reason) else None

    def _add_progress(self, event: admin_pb2.JobEvent, attempt: Attempt) -> admin_pb2.JobEvent | None:
        job = self._parts.coordinator.jobs[self._job_id]
        summary = self._parts.progress.summarize(job, attempt)
        if summary is None or not self._is_new(attempt.key, (summary, *event.waiting.silent_client_ids)):
            return None
        event.progress.CopyFrom(convert.progress(summary))
        return event

    def _is_new(self, place: object, content: object) -> bool:
        before, self._last = self._last, (place, content)
        return self._last != before

    async def wait(self, changed: asyncio.Event) -> None:
        """Wait until the job has changed or an event is due."""
        timeout_s = self._due_at - self._clock()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), None if math.isinf(timeout_s) else timeout_s)
