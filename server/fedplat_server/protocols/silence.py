"""Silos of decentralised jobs that have become silent, so that the others need not wait for them.

A silo that works has a long poll open nearly all the time. One that has had none, and has made no call, for
`MISSED_HEARTBEATS` heartbeats of its job is lost until it announces a model again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from fedplat.rounds import Coordinator, JobState, events, states
from fedplat.rounds.protocols.gossip import find_state, state_of
from fedplat_server.auth.client_directory import ClientDirectory

MISSED_HEARTBEATS = 3
_CHECK_EVERY_S = 1.0


class SilenceMonitor:
    """Looks every second for silent silos, and posts `SilosLost`; `clock` is monotonic."""

    def __init__(
        self,
        coordinator: Coordinator,
        clients: ClientDirectory,
        post: Callable[[events.SilosLost], None],
        clock: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._clients = clients
        self._post = post
        self._clock = clock
        self._heard: dict[tuple[str, str], tuple[float, float | None]] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="silent silos")

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def check(self) -> None:
        """Post the silos that have been silent for too long. All have their whole time after a start of the server."""
        now, known = self._clock(), dict[tuple[str, str], tuple[float, float | None]]()
        for job in _list_jobs(self._coordinator):
            lost: list[str] = []
            for client_id in _list_silos(job):
                last_call = self._clients.last_seen_unix_s.get(client_id)
                at, last_known = self._heard.get((job.job_id, client_id), (now, last_call))
                if self._clients.has_open_call(client_id) or last_call != last_known:
                    at = now
                known[job.job_id, client_id] = at, last_call
                if now - at > MISSED_HEARTBEATS * job.spec.deadlines.heartbeat_s:
                    lost.append(client_id)
            if lost:
                self._post(events.SilosLost(job.job_id, tuple(lost)))
        self._heard = known

    async def _run(self) -> None:
        while True:
            self.check()
            await asyncio.sleep(_CHECK_EVERY_S)


def _list_jobs(coordinator: Coordinator) -> Iterator[JobState]:
    """Yield the decentralised jobs that run."""
    for job in coordinator.jobs.values():
        if find_state(job) is not None and job.status is states.JobStatus.RUNNING:
            yield job


def _list_silos(job: JobState) -> list[str]:
    """Return the silos that a job waits for: those with work, and those that have taken part and not left."""
    busy = {each.client_id for each in job.open_attempt.busy} if job.open_attempt is not None else set[str]()
    return sorted(busy | state_of(job).members)
