"""The service `Jobs`: jobs, their rounds and their models."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

from typing_extensions import override

from fedplat.loaded_plugins import describe_versions
from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.events import JobAction, OperatorCommand, RollbackOrdered
from fedplat.rounds.states import ENDED_JOBS
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, model_pb2
from fedplat_server.auth.audit_limits import RecentEntries
from fedplat_server.coordination import job_checks
from fedplat_server.database.jobs import AttemptRecord, JobRecord, VersionRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records import audit
from fedplat_server.records.audit import AuditEntry
from fedplat_server.rpc import convert, pages, streams, validation
from fedplat_server.rpc.handlers import Context
from fedplat_server.rpc.operator_access import current_operator
from fedplat_server.rpc.progress_events import ProgressEvents
from fedplat_server.rpc.services import Services

_AUDIT_ACTIONS = {
    JobAction.START: audit.AuditAction.JOB_STARTED,
    JobAction.PAUSE: audit.AuditAction.JOB_PAUSED,
    JobAction.RESUME: audit.AuditAction.JOB_RESUMED,
    JobAction.CANCEL: audit.AuditAction.JOB_CANCELLED,
}
VERSIONS_PER_QUERY = 1000
MAX_RANGES = 20
"""Maximum number of version ranges in an error message."""


class JobsService(admin_pb2_grpc.JobsServicer):
    """The handlers of the service."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._exports = RecentEntries()

    @override
    async def UploadModel(
        self, request_iterator: AsyncIterator[admin_pb2.UploadModelRequest], context: Context
    ) -> admin_pb2.UploadModelResponse:
        limits = self._services.config.limits
        parts = (part.data async for part in streams.enforce_min_rate(request_iterator, limits))
        blob = await streams.store_model(self._services.blobs, parts, limits.max_model_bytes)
        details = {"size_bytes": blob.size_bytes}
        entry = AuditEntry(current_operator(), audit.AuditAction.MODEL_UPLOADED, blob.digest, details)
        await self._services.store.audit.append([entry])
        return admin_pb2.UploadModelResponse(digest=blob.digest, size_bytes=blob.size_bytes)

    @override
    async def CreateJob(self, request: admin_pb2.CreateJobRequest, context: Context) -> admin_pb2.Job:
        services, max_bytes = self._services, self._services.config.limits.max_job_file_bytes
        plugins = services.config.plugins
        spec = await asyncio.to_thread(job_checks.parse, request.job_file, max_bytes, plugins.table)
        config = services.config
        job_checks.check_is_runnable(
            spec, services.evaluation.names, sorted(config.trainers), sorted(config.flower_apps)
        )
        digest = validation.digest(request.initial_digest)
        with services.blobs.protect(digest):
            path = services.blobs.path(digest)
            size_bytes = await asyncio.to_thread(job_checks.check_initial_model, path, spec)
            initial = ModelVersion(version=0, round=0, attempt=0, digest=digest, size_bytes=size_bytes)
            used = plugins.find_used(spec, spec.config)
            state = JobState(job_id=services.new_id("j"), spec=spec, latest=initial, plugins=used)
            entry = AuditEntry(current_operator(), audit.AuditAction.JOB_CREATED, state.job_id, {"name": spec.name})
            key = validation.key(request.idempotency_key)
            record = await services.budgets.create_job(state, request.job_file, key, [entry])
        services.jobs.add(record)
        return await self._job(services.jobs.find(record.state.job_id))

    @override
    async def ListJobs(self, request: admin_pb2.ListJobsRequest, context: Context) -> admin_pb2.ListJobsResponse:
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        records = self._services.jobs.all(after)[: size + 1]
        jobs = [await self._job(dataclasses.replace(record, job_file="")) for record in records]
        page, token = pages.cut(jobs, size, lambda job: job, lambda job: job.job_id)
        return admin_pb2.ListJobsResponse(jobs=page, next_page_token=token)

    @override
    async def ShowJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        return await self._job(self._services.jobs.find(request.job))

    @override
    async def StartJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        return await self._command(request.job, JobAction.START)

    @override
    async def PauseJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        return await self._command(request.job, JobAction.PAUSE)

    @override
    async def ResumeJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        return await self._command(request.job, JobAction.RESUME)

    @override
    async def CancelJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        return await self._command(request.job, JobAction.CANCEL)

    @override
    async def RollbackJob(
        self, request: admin_pb2.RollbackJobRequest, context: Context
    ) -> admin_pb2.RollbackJobResponse:
        services = self._services
        job = services.jobs.find(request.job).state
        record = await self._find_version(job, request.version)
        version = record.version
        if record.state_removed_unix_s is not None:
            version = convert.without_state(version)
        details = {"name": job.spec.name, "from": job.latest.version, "to": version.version}
        entry = AuditEntry(current_operator(), audit.AuditAction.JOB_ROLLED_BACK, job.job_id, details)
        verdict = await services.runner.submit(RollbackOrdered(job.job_id, version), audit=[entry])
        if not verdict.accepted:
            raise RefusedError(Code.ILLEGAL_ACTION, verdict.text)
        latest = services.jobs.state(job.job_id).latest
        if latest.restored_from == version.version:
            version = latest  # also if an earlier call restored it
        message = await self._job(services.jobs.find(job.job_id))
        return admin_pb2.RollbackJobResponse(job=message, rule_state=_rule_state(job, version, record))

    @override
    async def WatchJob(self, request: admin_pb2.WatchJobRequest, context: Context) -> AsyncIterator[admin_pb2.JobEvent]:
        services = self._services
        job_id = services.jobs.find(request.job).state.job_id
        progress = ProgressEvents(services, job_id, validation.progress_every_s(request.progress_every_s))
        sequence = min(request.after_sequence, 2**62)  # above all sequence numbers, but within the database's range
        while True:
            changed = services.jobs.next_change(job_id)
            # The last version may still be evaluated when the job has ended.
            is_over = services.jobs.state(job_id).status in ENDED_JOBS and not services.evaluation.is_pending(job_id)
            rows = await services.store.jobs.list_history(job_id, sequence)
            for record in rows:
                sequence = record.sequence
                yield convert.event(record)
            if (event := progress.next_event(sequence)) is not None:
                yield event
            if rows:
                continue
            if is_over:
                return
            if services.draining:  # to the caller, the end of the stream means that the job has ended
                raise RefusedError(Code.DRAINING)
            await progress.wait(changed)

    @override
    async def ListRounds(self, request: admin_pb2.ListRoundsRequest, context: Context) -> admin_pb2.ListRoundsResponse:
        store, job_id = self._services.store, self._services.jobs.find(request.job).state.job_id
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.PAIR)
        after = (last[0], last[1]) if last is not None else None
        attempts = await store.jobs.list_attempts(
            job_id, all_attempts=request.all_attempts, after=after, limit=size + 1
        )
        if not attempts:
            return admin_pb2.ListRoundsResponse()
        versions = await store.jobs.list_versions_of_rounds(job_id, attempts[0].key.round, attempts[-1].key.round)
        metrics = {(record.version.round, record.version.attempt): record.metrics for record in versions}
        rounds, token = pages.cut(
            attempts,
            size,
            lambda attempt: self._round(attempt, metrics.get(attempt.key[1:], {})),
            lambda attempt: f"{attempt.key.round}.{attempt.key.number}",
        )
        return admin_pb2.ListRoundsResponse(rounds=rounds, next_page_token=token)

    @override
    async def ListModelVersions(
        self, request: admin_pb2.ListModelVersionsRequest, context: Context
    ) -> admin_pb2.ListModelVersionsResponse:
        state = self._services.jobs.find(request.job).state
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.NUMBER)
        after = last[0] if last is not None else -1
        records = await self._services.store.jobs.list_versions(state.job_id, after=after, limit=size + 1)
        versions, token = pages.cut(
            records,
            size,
            lambda record: convert.version(record, state.spec),
            lambda record: str(record.version.version),
        )
        return admin_pb2.ListModelVersionsResponse(versions=versions, next_page_token=token)

    @override
    async def ExportModel(
        self, request: admin_pb2.ExportModelRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ExportModelResponse]:
        job = self._services.jobs.find(request.job).state
        number = request.version if request.HasField("version") else job.latest.version
        version = (await self._find_version(job, number)).version
        await self._audit_export(current_operator(), job.job_id, version)
        yield admin_pb2.ExportModelResponse(model=convert.model_ref(version))
        async for message in streams.send(self._services.chunks, self._services.blobs.path(version.digest), 0):
            yield admin_pb2.ExportModelResponse(data=model_pb2.Chunk.FromString(message).data)

    async def _command(self, name: str, action: JobAction) -> admin_pb2.Job:
        record = self._services.jobs.find(name)
        job_id, before = record.state.job_id, record.state.plugins
        loaded = self._services.config.plugins.select(before)
        details = {"name": name}
        if action in (JobAction.START, JobAction.RESUME) and loaded != before:
            details["plugins"] = describe_versions(loaded)
        entry = AuditEntry(current_operator(), _AUDIT_ACTIONS[action], job_id, details)
        command = OperatorCommand(job_id, action, loaded, record.problem)
        verdict = await self._services.runner.submit(command, audit=[entry])
        if not verdict.accepted:
            raise RefusedError(Code.ILLEGAL_ACTION, verdict.text)
        return await self._job(self._services.jobs.find(job_id))

    async def _job(self, record: JobRecord) -> admin_pb2.Job:
        last = await self._services.store.jobs.find_last_attempt(record.state.job_id)
        return convert.job(record, self._round(last, {}) if last is not None else None)

    def _round(self, record: AttemptRecord, server_metrics: Mapping[str, float]) -> admin_pb2.Round:
        attempt = self._services.jobs.state(record.key.job_id).open_attempt
        if attempt is None or attempt.key != record.key:
            return convert.round_(record, server_metrics)
        return convert.round_(record, server_metrics, self._services.progress.summarize(attempt))

    async def _find_version(self, job: JobState, number: int) -> VersionRecord:
        """Return the version of this number. Raises `RefusedError` if it is unknown, or its file was removed."""
        store = self._services.store
        records: Sequence[VersionRecord] = ()
        if number <= job.latest.version:
            records = await store.jobs.list_versions(job.job_id, after=number - 1, limit=1)
        if not records:
            raise RefusedError(Code.NO_SUCH_VERSION, f"{number}; the latest is {job.latest.version}")
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
            await self._services.store.audit.append([entry])
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
    if job.spec.privacy is not None:
        return "latest"
    return "kept" if version.state_digest else "initial"
