"""The relay of a decentralised job, which sends files from silo to silo, and silos that have become silent.

A silo that works has a long poll open nearly all the time. One that has had none, and has made no call, for
`MISSED_HEARTBEATS` heartbeats of its job is lost until it announces a model again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path

from fedplat.gossip import steps
from fedplat.rounds import Assignment, Attempt, AttemptKey, Coordinator, JobState, events, states
from fedplat.rounds.protocols.gossip import find_state, state_of
from fedplat.secure_aggregation.relay import sealed_bytes
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.auth import client_directory, rate_limits
from fedplat_server.config import Limits
from fedplat_server.coordination.long_polls import list_event
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import streams, validation
from fedplat_server.messages.streams import UploadMemory
from fedplat_server.storage.read_cache import Chunks
from fedplat_server.storage.spool_file import RelayedFile, RelayStore

MAX_NAME = 200
"""Maximum length of a file's name, and of a client's id."""


ListWaiting = Callable[[str], Collection[str]]
"""A function of a job's id that returns the silos that wait for a mean in the relay."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Relay:
    """Receives files from silos and sends them to their receivers. `list_waiting` returns who waits for a mean."""

    list_waiting: ListWaiting
    limits: Limits
    coordinator: Coordinator
    quotas: rate_limits.Quotas
    memory: UploadMemory
    relay: RelayStore
    chunks: Chunks
    _waiting: dict[RelayedFile, set[asyncio.Event]] = dataclasses.field(
        default_factory=dict[RelayedFile, set[asyncio.Event]], init=False
    )

    async def keep(self, attempts: Collection[AttemptKey], known: Collection[str]) -> None:
        """Remove the files of known attempts that are not among these; see `RelayStore.keep`."""
        await asyncio.to_thread(self.relay.keep, attempts, known)

    def follow(self, attempt: Attempt) -> None:
        """Delete the files that a stored attempt makes obsolete."""
        self.relay.follow(attempt)

    async def close(self) -> None:
        """Wait for pending deletions."""
        await self.relay.close()

    async def receive(
        self, assignment: Assignment, header: fleet_pb2.UploadHeader, messages: AsyncIterator[streams.UploadMessage]
    ) -> int:
        """Receive a file from the header's offset on; return the number of bytes stored so far.

        Raises `RefusedError`, also for a file that the job does not need from this silo.
        """
        key = _key(assignment, header.receiver, header.name)
        limit = self._find_limit(assignment, key)
        if limit is None:
            raise RefusedError(Code.STALE_ASSIGNMENT, "no silo waits for this file")
        if header.size_bytes > limit:
            text = f"the file has {header.size_bytes} bytes; at most {limit} are accepted for it"
            raise RefusedError(Code.TOO_LARGE, text)
        total_limit = self._find_total_limit(key)

        async def contents() -> AsyncIterator[streams.UploadMessage]:
            async for part in messages:
                self.quotas.upload(assignment.client_id, key.attempt, total_limit, len(part.data))
                yield part

        size_bytes = min(max(header.size_bytes - header.offset, 0), streams.UPLOAD_BYTES)
        async with self.memory.uploads.share(size_bytes):
            open_upload = functools.partial(self.relay.open, key)
            is_wanted = functools.partial(self._is_wanted, assignment, key)
            writer = await streams.open_writer(open_upload, header, is_wanted, self.limits.idle_s)
            received = await streams.receive(writer, header.size_bytes, contents(), is_wanted)
        if received == header.size_bytes:
            for event in self._waiting.get(key, ()):
                event.set()
        return received

    async def count_received(self, assignment: Assignment, request: fleet_pb2.QueryUploadRequest) -> int:
        """Return the number of bytes of a file that were received, where its upload resumes."""
        key, digest = _key(assignment, request.receiver, request.name), validation.digest(request.digest)
        return await asyncio.to_thread(self.relay.count_received, key, digest)

    async def send(self, assignment: Assignment, request: fleet_pb2.DownloadRequest) -> AsyncIterator[bytes]:
        """Yield a file for a silo, as messages `Chunk`; wait for it at most `request.wait_s`. Raises `RefusedError`."""
        key = RelayedFile(assignment.key, _name(request.sender), assignment.client_id, _name(request.name))
        path = await self._wait(key, validation.wait_s(request.wait_s, self.limits))
        size_bytes = (await asyncio.to_thread(path.stat)).st_size
        if request.offset > size_bytes:
            text = f"the offset is {request.offset}, but the file has {size_bytes} bytes"
            raise RefusedError(Code.WRONG_OFFSET, text)
        async with contextlib.aclosing(self.chunks.messages(path, request.offset, size_bytes)) as messages:
            async for message in messages:
                yield message

    async def _wait(self, key: RelayedFile, wait_s: float) -> Path:
        with list_event(self._waiting, key, asyncio.Event()) as arrived:
            path = await asyncio.to_thread(self.relay.find, key)
            if path is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), wait_s)
                path = await asyncio.to_thread(self.relay.find, key)
        if path is None:
            raise RefusedError(Code.NOT_SENT_YET)
        return path

    def _is_wanted(self, assignment: Assignment, key: RelayedFile) -> bool:
        return self._find_limit(assignment, key) is not None

    def _find_limit(self, assignment: Assignment, key: RelayedFile) -> int | None:
        """Return the bytes that a file may have; None if the silo may not send it now."""
        job = self.coordinator.jobs[key.attempt.job_id]
        current, state = job.find(*assignment.id), find_state(job)
        if state is None or current is None or not current.is_busy:
            return None
        waiting = self.list_waiting(job.job_id)
        mean_bytes = job.latest.size_bytes
        size_bytes = steps.relayed_bytes(state, key.sender, key.receiver, key.name, waiting, mean_bytes)
        return None if size_bytes is None else sealed_bytes(size_bytes)

    def _find_total_limit(self, key: RelayedFile) -> int:
        """Return the bytes that a silo may have to send in an attempt: models, means, and chunks of each ring so far.

        It depends on no single file: what a silo sends in an attempt is counted together.
        """
        job = self.coordinator.jobs[key.attempt.job_id]
        state = state_of(job)
        own = state.announced.get(key.sender)
        largest = max(own.size_bytes if own is not None else 0, job.latest.size_bytes)
        num_files = len(state.announced) + len(self.list_waiting(job.job_id)) + 2 * max(state.attempt, 1)
        return num_files * sealed_bytes(largest)


def _key(assignment: Assignment, receiver: str, name: str) -> RelayedFile:
    return RelayedFile(assignment.key, assignment.client_id, _name(receiver), _name(name))


def _name(text: str) -> str:
    if not 1 <= len(text) <= MAX_NAME:
        raise RefusedError(Code.INVALID_REQUEST, f"a client or file must be named by 1 to {MAX_NAME} characters")
    return text


MISSED_HEARTBEATS = 3
_CHECK_EVERY_S = 1.0


class SilenceMonitor:
    """Looks every second for silent silos, and posts `SilosLost`; `clock` is monotonic."""

    def __init__(
        self,
        coordinator: Coordinator,
        clients: client_directory.ClientDirectory,
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
