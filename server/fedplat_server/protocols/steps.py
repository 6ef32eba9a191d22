"""The common part of steps that clients take within an assignment."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fedplat.rounds import Assignment, JobState
from fedplat_server.auth.client_directory import ClientDirectory
from fedplat_server.auth.rate_limits import Quotas
from fedplat_server.config import Limits
from fedplat_server.coordination.long_polls import LongPolls
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.sql_jobs import JobStore

_Response = TypeVar("_Response")
Find = Callable[[JobState, Assignment | None], Awaitable[tuple[_Response, bool]]]
"""A function of a job and an assignment, if it is known: the response, and whether the client gets it at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepParts:
    """The parts that steps use."""

    limits: Limits
    runner: Runner
    store: JobStore
    clients: ClientDirectory
    long_polls: LongPolls
    quotas: Quotas

    def job(self, job_id: str) -> JobState:
        """Return the coordinator's state of an existing job."""
        return self.runner.coordinator.jobs[job_id]


class Steps:
    """Handles the steps of one kind of assignment: what the client has to do next follows from the stored state.

    So a client repeats a call until it is answered, and a restarted server answers as before.
    """

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    async def _wait(self, before: Assignment, wait_s: float, find: Find[_Response]) -> _Response:
        """Return the response as soon as the client gets it at once, and after `wait_s` in every case."""
        clock, parts = asyncio.get_running_loop().time, self._parts
        ends_at = clock() + wait_s
        while True:
            with parts.long_polls.open_step(*before.id) as changed:
                job = parts.job(before.key.job_id)
                # Not in the job's state any more: another attempt has begun since.
                current = job.find(*before.id) or await parts.store.find_assignment(before.token_hash)
                response, is_next = await find(job, current)
                if is_next or clock() >= ends_at:
                    return response
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), ends_at - clock())
            await parts.clients.find(before.client_id)  # it may have been revoked meanwhile
