"""The progress events of a watch, about the open attempt. They are not part of the job's history."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from fedplat.rounds import AttemptKey
from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination.progress import ProgressSummary
from fedplat_server.rpc import convert
from fedplat_server.rpc.services import Services


class ProgressEvents:
    """The progress events of one watch of a job: at most one in `every_s` seconds; 0 disables them."""

    def __init__(self, services: Services, job_id: str, every_s: float) -> None:
        self._services = services
        self._job_id = job_id
        self._every_s = every_s or math.inf
        self._clock = asyncio.get_running_loop().time
        self._due_at = self._clock() + self._every_s
        self._last: tuple[AttemptKey, ProgressSummary] | None = None

    def next_event(self, sequence: int) -> admin_pb2.JobEvent | None:
        """Return an event if one is due and the progress has changed; `sequence` is that of the previous event."""
        if self._clock() < self._due_at:
            return None
        self._due_at = self._clock() + self._every_s
        attempt = self._services.jobs.state(self._job_id).open_attempt
        summary = self._services.progress.summarize(attempt) if attempt is not None else None
        if attempt is None or summary is None or (attempt.key, summary) == self._last:
            return None
        self._last = (attempt.key, summary)
        return admin_pb2.JobEvent(
            sequence=sequence,
            unix_s=time.time(),
            entity="progress",
            round=attempt.key.round,
            attempt=attempt.key.number,
            kind=convert.KINDS[attempt.kind],
            progress=convert.progress(summary),
        )

    async def wait(self, changed: asyncio.Event) -> None:
        """Wait until the job has changed or an event is due."""
        timeout_s = self._due_at - self._clock()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), None if math.isinf(timeout_s) else timeout_s)
