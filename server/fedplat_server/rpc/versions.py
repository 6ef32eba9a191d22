"""The methods of `admin.proto` about the versions of a job: list, export, roll back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, TypeAlias

from grpc import aio

from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.events import RollbackOrdered
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, model_pb2
from fedplat_server.audit import Action, AuditEntry
from fedplat_server.bounded_audit import Recent
from fedplat_server.rpc import convert, gate, pages, streams
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.services import Services
from fedplat_server.store.jobs import JobRecord, VersionRecord

Context: TypeAlias = "aio.ServicerContext[Any, Any]"  # a string: generic for the type checker only
PAGE = 1000
MOST_SHOWN = 20
"""How many ranges of version numbers an error names."""


class VersionMethods(admin_pb2_grpc.AdminServicer):
    """What `AdminService` answers about versions."""

    _services: Services
    _exported: Recent

    async def _job(self, record: JobRecord) -> admin_pb2.Job:
        raise NotImplementedError

    async def ListModelVersions(
        self, request: admin_pb2.ListModelVersionsRequest, context: Context
    ) -> admin_pb2.ListModelVersionsResponse:
        """A page of the committed versions of a job."""
        state = self._services.jobs.find(request.job).state
        size, given = pages.size(request.page_size), pages.numbers(request.page_token, pages.NUMBER)
        after = given[0] if given is not None else -1
        records = await self._services.store.jobs.list_versions(state.job_id, after=after, limit=size + 1)
        versions, token = pages.cut(
            records,
            size,
            lambda record: convert.version(record, state.spec),
            lambda record: str(record.version.version),
        )
        return admin_pb2.ListModelVersionsResponse(versions=versions, next_page_token=token)

    async def ExportModel(
        self, request: admin_pb2.ExportModelRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ExportModelResponse]:
        """Sends the file of a version."""
        job = self._services.jobs.find(request.job).state
        wanted = request.version if request.HasField("version") else job.latest.version
        found = (await self._kept(job, wanted)).version
        await self._note_export(gate.caller(), job.job_id, found)
        yield admin_pb2.ExportModelResponse(model=convert.model_ref(found))
        async for message in streams.send(self._services.chunks, self._services.blobs.path(found.digest), 0):
            yield admin_pb2.ExportModelResponse(data=model_pb2.Chunk.FromString(message).data)

    async def RollbackJob(
        self, request: admin_pb2.RollbackJobRequest, context: Context
    ) -> admin_pb2.RollbackJobResponse:
        """Lets a job go on from an older version."""
        services = self._services
        job = services.jobs.find(request.job).state
        record = await self._kept(job, request.version)
        version = record.version
        if record.state_removed_unix_s is not None:
            version = convert.without_state(version)
        entry = AuditEntry(
            gate.caller(),
            Action.JOB_ROLLED_BACK,
            job.job_id,
            {"name": job.spec.name, "from": job.latest.version, "to": version.version},
        )
        verdict = await services.runner.submit(RollbackOrdered(job.job_id, version), audit=[entry])
        if not verdict.accepted:
            raise RefusedError(Code.ILLEGAL_ACTION, verdict.text)
        latest = services.jobs.state(job.job_id).latest
        if latest.restored_from == version.version:
            version = latest  # what was done, also if it was done before
        shown = await self._job(services.jobs.find(job.job_id))
        return admin_pb2.RollbackJobResponse(job=shown, rule_state=_rule_state(job, version, record))

    async def _kept(self, job: JobState, wanted: int) -> VersionRecord:
        """Return the version of this number, whose file is there. Raises `RefusedError`."""
        store = self._services.store
        found: Sequence[VersionRecord] = ()
        if wanted <= job.latest.version:
            found = await store.jobs.list_versions(job.job_id, after=wanted - 1, limit=1)
        if not found:
            raise RefusedError(Code.NO_SUCH_VERSION, f"{wanted}; the latest is {job.latest.version}")
        if found[0].model_removed_unix_s is None:
            return found[0]
        kept: list[int] = []
        after = -1
        while page := await store.jobs.list_versions(job.job_id, after=after, limit=PAGE):
            kept += [record.version.version for record in page if record.model_removed_unix_s is None]
            after = page[-1].version.version
        raise RefusedError(Code.VERSION_REMOVED, f"{wanted}; kept are {ranges(kept)}")

    async def _note_export(self, operator: str, job_id: str, version: ModelVersion) -> None:
        """Note that an operator takes a model away, once an hour at most for each version."""
        name = f"{operator} {job_id} {version.version}"
        if not self._exported.add(name, asyncio.get_running_loop().time()):
            return
        details = {"version": version.version, "digest": version.digest}
        try:
            await self._services.store.audit.append([AuditEntry(operator, Action.MODEL_EXPORTED, job_id, details)])
        except BaseException:
            self._exported.forget(name)
            raise


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in words: "0, 5 to 7, 9"; of many ranges the last."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in found[-MOST_SHOWN:]]
    return ("..., " if len(found) > MOST_SHOWN else "") + ", ".join(shown)


def _rule_state(job: JobState, version: ModelVersion, record: VersionRecord) -> str:
    """What the rule goes on with, as `RollbackJobResponse` names it."""
    if not (record.version.state_digest or job.latest.state_digest):
        return "none"
    if job.spec.privacy is not None:
        return "latest"
    return "kept" if version.state_digest else "initial"
