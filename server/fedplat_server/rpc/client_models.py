"""The models that clients get: inside their assignments, or as files that they download."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable

from fedplat.rounds import AssignmentId, JobState, ModelVersion
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat_server.coordination.progress import Downloads
from fedplat_server.coordination.runner import Runner
from fedplat_server.database import clients, sql_jobs
from fedplat_server.errors import Code, RefusedError
from fedplat_server.instruments import Instruments
from fedplat_server.messages import streams
from fedplat_server.rpc.client_access import ClientAccess
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.read_cache import Chunks, InlineModels


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ClientModels:
    """Sends models to clients, counts their bytes, and records which clients have the model of their assignment."""

    access: ClientAccess
    runner: Runner
    store: sql_jobs.JobStore
    blobs: BlobStore
    chunks: Chunks
    inline_models: InlineModels
    downloads: Downloads
    instruments: Instruments

    async def find_base(self, job: JobState, version: int) -> ModelVersion:
        """Return the version that an assignment starts from; not the latest if a late client reclaims it."""
        base = job.latest if job.latest.version == version else None
        base = base or await self.store.find_version(job.job_id, version)
        assert base is not None
        return base

    async def include(self, job: JobState, model: ModelVersion, assignment: AssignmentId) -> bytes:
        """Return the model for the message of an assignment; empty if it is too large for that."""
        content = await self.inline_models.content(model)
        if content:
            self.downloads.record(assignment)
            self._count_bytes(job, "inline", len(content))
        return content

    async def require_access(self, client: clients.ClientRecord, digest: str) -> None:
        """Raise `RefusedError` for a file that is not for this client."""
        for job in self.runner.coordinator.jobs.values():
            latest = job.latest
            if digest in (latest.digest, latest.delta_digest) and job.spec.population == client.population:
                return
        if client.population not in await self.store.find_populations(digest):
            raise RefusedError(Code.NO_SUCH_MODEL, digest)

    async def send(self, client: clients.ClientRecord, digest: str, offset: int) -> AsyncGenerator[bytes]:
        """Yield the messages of a file from an offset on. Raises `RefusedError`."""
        count_bytes = self._bytes_counter(client, digest)
        found = streams.send(self.chunks, self.blobs, digest, offset)
        async with contextlib.aclosing(found) as messages:
            async for message in messages:
                await self.access.require(client)
                count_bytes(len(message))
                yield message

    async def note_download(self, client: clients.ClientRecord, digest: str) -> None:
        """Record that a client has received a whole file, if it is the model of its assignment or the step to it."""
        coordinator = self.runner.coordinator
        key = coordinator.assignment_of(client.client_id)
        assignment = coordinator.find(key, client.client_id) if key is not None else None
        if key is None or assignment is None:
            return
        base = await self.find_base(coordinator.jobs[key.job_id], assignment.base_version)
        if digest in (base.digest, base.delta_digest):
            self.downloads.record(assignment.id)

    def _bytes_counter(self, client: clients.ClientRecord, digest: str) -> Callable[[int], None]:
        """Return a function that counts bytes of a file as sent to a client, for the job that it works for."""
        coordinator = self.runner.coordinator
        key = coordinator.assignment_of(client.client_id)
        job = coordinator.jobs.get(key.job_id) if key is not None else None
        form = "delta" if job is not None and digest == job.latest.delta_digest else "file"
        return functools.partial(self._count_bytes, job, form)

    def _count_bytes(self, job: JobState | None, form: str, num_bytes: int) -> None:
        instruments = self.instruments
        if job is None or disclosure_of(job.spec).shows_cohorts:
            labels = instruments.jobs.of(job.job_id if job is not None else "")
            instruments.model_bytes.labels(*labels, form).inc(num_bytes)
