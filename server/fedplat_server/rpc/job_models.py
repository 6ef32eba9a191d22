"""The handlers of the service `Jobs` for models: uploaded, listed, exported, and restored as the latest ones."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence

from typing_extensions import override

from fedplat.rounds import JobState, ModelVersion, events, privacy_rules
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, model_pb2
from fedplat_server.auth.rate_limits import RecentEntries
from fedplat_server.config import Limits
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.records import VersionRecord
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, streams
from fedplat_server.records import audit
from fedplat_server.records.audit import AuditEntry
from fedplat_server.rpc import interceptor, job_registry, job_view, operator_access, pages
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.read_cache import Chunks

VERSIONS_PER_QUERY = 1000
MAX_RANGES = 20
"""Maximum number of version ranges in an error message."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class JobModelsService(admin_pb2_grpc.JobsServicer):
    """The methods that receive and send models."""

    jobs: job_registry.JobRegistry
    view: job_view.JobView
    store: Store
    runner: Runner
    blobs: BlobStore
    chunks: Chunks
    limits: Limits
    _exports: RecentEntries = dataclasses.field(default_factory=RecentEntries, init=False)

    @override
    async def UploadModel(
        self, request_iterator: AsyncIterator[admin_pb2.UploadModelRequest], context: interceptor.Context
    ) -> admin_pb2.UploadModelResponse:
        limits = self.limits
        parts = (part.data async for part in streams.enforce_min_rate(request_iterator, limits))
        blob = await streams.store_model(self.blobs, parts, limits.max_model_bytes)
        details = {"size_bytes": blob.size_bytes}
        entry = AuditEntry(operator_access.current_operator(), audit.AuditAction.MODEL_UPLOADED, blob.digest, details)
        await self.store.audit.append([entry])
        return admin_pb2.UploadModelResponse(digest=blob.digest, size_bytes=blob.size_bytes)

    @override
    async def ListModelVersions(
        self, request: admin_pb2.ListModelVersionsRequest, context: interceptor.Context
    ) -> admin_pb2.ListModelVersionsResponse:
        state = self.jobs.find(request.job).state
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.NUMBER)
        after = last[0] if last is not None else request.first_version - 1
        records = await self.store.jobs.list_versions(state.job_id, after=after, limit=size + 1)
        versions, token = pages.cut(
            records,
            size,
            lambda record: convert.version(record, state.spec),
            lambda record: str(record.version.version),
        )
        total = state.latest.version + 1  # their numbers are dense
        return admin_pb2.ListModelVersionsResponse(versions=versions, next_page_token=token, total=total)

    @override
    async def ExportModel(
        self, request: admin_pb2.ExportModelRequest, context: interceptor.Context
    ) -> AsyncIterator[admin_pb2.ExportModelResponse]:
        job = self.jobs.find(request.job).state
        number = request.version if request.HasField("version") else job.latest.version
        version = (await self._find_version(job, number)).version
        await self._audit_export(operator_access.current_operator(), job.job_id, version)
        yield admin_pb2.ExportModelResponse(model=convert.model_ref(version))
        async for message in streams.send(self.chunks, self.blobs, version.digest, 0):
            yield admin_pb2.ExportModelResponse(data=model_pb2.Chunk.FromString(message).data)

    @override
    async def RollbackJob(
        self, request: admin_pb2.RollbackJobRequest, context: interceptor.Context
    ) -> admin_pb2.RollbackJobResponse:
        job = self.jobs.find(request.job).state
        record = await self._find_version(job, request.version)
        version = record.version
        if record.state_removed_unix_s is not None:
            version = convert.without_state(version)
        details = {"name": job.spec.name, "from": job.latest.version, "to": version.version}
        entry = AuditEntry(operator_access.current_operator(), audit.AuditAction.JOB_ROLLED_BACK, job.job_id, details)
        verdict = await self.runner.submit(events.RollbackOrdered(job.job_id, version), audit=[entry])
        if not verdict.accepted:
            raise RefusedError(Code.ILLEGAL_ACTION, verdict.text)
        latest = self.jobs.state(job.job_id).latest
        if latest.restored_from == version.version:
            version = latest  # also if an earlier call restored it
        message = await self.view.show(self.jobs.find(job.job_id))
        return admin_pb2.RollbackJobResponse(job=message, rule_state=_rule_state(job, version, record))

    async def _find_version(self, job: JobState, number: int) -> VersionRecord:
        """Return the version of this number. Raises `RefusedError` if it is unknown, or its file was removed."""
        store = self.store
        records: Sequence[VersionRecord] = ()
        if number <= job.latest.version:
            records = await store.jobs.list_versions(job.job_id, after=number - 1, limit=1)
        if not records:
            raise RefusedError(Code.NO_SUCH_VERSION, f"{number}; the latest is {job.latest.version}")
        if records[0].version.is_held_by_clients:
            raise RefusedError(Code.HELD_BY_CLIENTS, f"version {number} has the digest {records[0].version.digest}")
        if records[0].model_removed_unix_s is None:
            return records[0]
        kept: list[int] = []
        after = -1
        while page := await store.jobs.list_versions(job.job_id, after=after, limit=VERSIONS_PER_QUERY):
            kept += [record.version.version for record in page if record.model_removed_unix_s is None]
            after = page[-1].version.version
        raise RefusedError(Code.VERSION_REMOVED, f"{number}; the kept versions are {format_ranges(kept)}")

    async def _audit_export(self, operator: str, job_id: str, version: ModelVersion) -> None:
        """Audit an operator's export of a version, at most once an hour."""
        name = f"{operator} {job_id} {version.version}"
        if not self._exports.add(name, asyncio.get_running_loop().time()):
            return
        details = {"version": version.version, "digest": version.digest}
        try:
            entry = AuditEntry(operator, audit.AuditAction.MODEL_EXPORTED, job_id, details)
            await self.store.audit.append([entry])
        except BaseException:
            self._exports.forget(name)
            raise


def format_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as ranges; only the last `MAX_RANGES` of them.

    >>> format_ranges([0, 5, 6, 7, 9])
    '0, 5 to 7, 9'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[-MAX_RANGES:]]
    return ("..., " if len(ranges) > MAX_RANGES else "") + ", ".join(parts)


def _rule_state(job: JobState, version: ModelVersion, record: VersionRecord) -> str:
    """Return the source of the rule's state after a rollback, as in `RollbackJobResponse.rule_state`."""
    if not (record.version.state_digest or job.latest.state_digest):
        return "none"
    if not privacy_rules.disclosure_of(job.spec).keeps_states:
        return "latest"
    return "kept" if version.state_digest else "initial"
