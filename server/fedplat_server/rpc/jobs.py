"""The service `Jobs`: jobs, their rounds and their models."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import structs
from typing_extensions import override

from fedplat.config.loaded_plugins import describe_versions
from fedplat.job import JobSpec
from fedplat.rounds import AttemptKey, JobState, ModelVersion
from fedplat.rounds.disclosure import disclosure_of
from fedplat.rounds.events import JobAction, OperatorCommand, RollbackOrdered, SpecChanged
from fedplat.rounds.states import ENDED_JOBS
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, model_pb2
from fedplat_server.auth.audit_limits import RecentEntries
from fedplat_server.coordination import job_checks
from fedplat_server.database.assignments import AssignmentRecord
from fedplat_server.database.jobs import AttemptFilter, AttemptRecord, JobRecord, VersionRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records import audit
from fedplat_server.records.audit import AuditEntry
from fedplat_server.rpc import convert, job_filters, pages, round_details, streams, validation, waiting
from fedplat_server.rpc.caller import current_operator
from fedplat_server.rpc.handlers import Context
from fedplat_server.rpc.progress_events import ProgressEvents
from fedplat_server.rpc.services import Services
from fedplat_server.storage.blobs import BlobStore

_AUDIT_ACTIONS = {
    JobAction.START: audit.AuditAction.JOB_STARTED,
    JobAction.PAUSE: audit.AuditAction.JOB_PAUSED,
    JobAction.RESUME: audit.AuditAction.JOB_RESUMED,
    JobAction.CANCEL: audit.AuditAction.JOB_CANCELLED,
}
_Result = TypeVar("_Result")
UPLOAD_FIRST = "upload it first (UploadModel)"
VERSIONS_PER_QUERY = 1000
MAX_RANGES = 20
"""Maximum number of version ranges in an error message."""


class JobsService(admin_pb2_grpc.JobsServicer):
    """The handlers of the service."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._exports = RecentEntries()
        self._parsing = asyncio.Lock()

    async def _run_alone(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Run a function in a thread, one at a time, also if its call has ended: a thread cannot be cancelled."""
        async with self._parsing:
            running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise

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
        spec = await self._run_alone(job_checks.parse, request.job_file, max_bytes, plugins.table)
        job_checks.check_is_runnable(spec, services.evaluation.names, sorted(services.config.trainers))
        await services.halves.training_of(spec).check_job(spec)
        digest = validation.digest(request.initial_digest)
        if not await self._has_done(audit.AuditAction.MODEL_UPLOADED, digest):  # or the version of a job of others
            raise RefusedError(Code.INVALID_MODEL, UPLOAD_FIRST)
        with services.blobs.protect(digest):
            size_bytes = await asyncio.to_thread(_check_initial_model, services.blobs, digest, spec)
            initial = ModelVersion(version=0, round=0, attempt=0, digest=digest, size_bytes=size_bytes)
            used = plugins.find_used(spec, spec.config)
            state = JobState(job_id=services.new_id("j"), spec=spec, latest=initial, plugins=used)
            entry = AuditEntry(current_operator(), audit.AuditAction.JOB_CREATED, state.job_id, {"name": spec.name})
            key = validation.key(request.idempotency_key)
            record = await services.budgets.create_job(state, request.job_file, key, [entry])
        created = record.state.job_id
        if created != state.job_id and not await self._has_done(audit.AuditAction.JOB_CREATED, created):
            raise RefusedError(Code.INVALID_REQUEST, "idempotency_key was used by another operator; choose a new one")
        services.jobs.add(record, creator=current_operator())
        return await self._job(services.jobs.find(record.state.job_id))

    @override
    async def ListJobs(self, request: admin_pb2.ListJobsRequest, context: Context) -> admin_pb2.ListJobsResponse:
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        jobs = self._services.jobs
        found = job_filters.select(jobs, job_filters.JobFilter.of(request), after)
        states = found.rest[: size + 1]
        keys = [state.attempt.key for state in states[:size] if state.attempt is not None]
        attempts = await self._services.store.jobs.find_attempts(keys)

        def encode(state: JobState) -> admin_pb2.Job:
            last = attempts.get(state.attempt.key) if state.attempt is not None else None
            return self._encode(dataclasses.replace(jobs.record(state.job_id), state=state, job_file=""), last)

        page, token = pages.cut(states, size, encode, lambda state: state.job_id)
        return admin_pb2.ListJobsResponse(
            jobs=page, next_page_token=token, total=found.total, num_by_status=found.num_by_status
        )

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
    async def SetJob(self, request: admin_pb2.SetJobRequest, context: Context) -> admin_pb2.Job:
        services, record = self._services, self._services.jobs.find(request.job)
        job = record.state
        if job.status in ENDED_JOBS:
            raise RefusedError(Code.ILLEGAL_ACTION, f"cannot change a job that is {job.status}")
        if record.problem:
            raise RefusedError(Code.ILLEGAL_ACTION, f"this server cannot read the job: {record.problem}")
        table, max_bytes = services.config.plugins.table, services.config.limits.max_job_file_bytes
        text, spec = await asyncio.to_thread(job_checks.change, record.job_file, request.changes, max_bytes, table)
        spec = structs.replace(job.spec, retention=spec.retention, retry=spec.retry)
        details = {"name": job.spec.name, "changes": "; ".join(request.changes)[:1000]}
        entry = AuditEntry(current_operator(), audit.AuditAction.JOB_CHANGED, job.job_id, details)
        await services.store.jobs.change_job_file(job.job_id, text, [entry])
        services.jobs.change_file(job.job_id, text)
        verdict = await services.runner.submit(SpecChanged(job.job_id, spec))
        if not verdict.accepted:
            raise RefusedError(Code.ILLEGAL_ACTION, verdict.text)
        return await self._job(services.jobs.find(job.job_id))

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
        if request.only_new:
            if request.after_sequence:
                raise RefusedError(Code.INVALID_REQUEST, "only_new and after_sequence exclude each other")
            sequence = await services.store.jobs.last_sequence(job_id)
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
            if is_over or request.until_now:
                return
            if services.draining:  # to the caller, the end of the stream means that the job has ended
                raise RefusedError(Code.DRAINING)
            await progress.wait(changed)

    @override
    async def ListRounds(self, request: admin_pb2.ListRoundsRequest, context: Context) -> admin_pb2.ListRoundsResponse:
        store, job_id = self._services.store.jobs, self._services.jobs.find(request.job).state.job_id
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.PAIR)
        if request.num_samples:
            attempts, total = await store.sample_attempts(job_id, min(request.num_samples, pages.MAX_ROWS))
            rounds = pages.thin_out(await self._rounds(job_id, attempts))
            return admin_pb2.ListRoundsResponse(rounds=rounds, total=total)
        after = (last[0], last[1]) if last is not None else None
        number = validation.number(request.round, "round")
        which = AttemptFilter(job_id, request.all_attempts, number, request.newest_first)
        attempts = await store.list_attempts(which, after=after, limit=size + 1)
        rounds, token = pages.cut(
            await self._rounds(job_id, attempts),
            size,
            lambda round_: round_,
            lambda last: f"{last.round}.{last.attempt}",
        )
        total = await store.count_attempts(which)
        return admin_pb2.ListRoundsResponse(rounds=rounds, next_page_token=token, total=total)

    @override
    async def ShowRound(self, request: admin_pb2.ShowRoundRequest, context: Context) -> admin_pb2.RoundDetails:
        job, store = self._services.jobs.find(request.job).state, self._services.store
        last, record = await self._find_attempt(job, request)
        (message,) = await self._rounds(job.job_id, [record])
        outcomes = await store.assignments.list_outcomes(record.key)
        groups = await store.assignments.count_labels(record.key, round_details.MAX_LABEL_SETS)
        is_private = not disclosure_of(job.spec).shows_clients
        return admin_pb2.RoundDetails(
            round=message,
            reasons=round_details.reasons(outcomes),
            labels=await asyncio.to_thread(round_details.labels, groups, is_private=is_private),
            num_attempts=last.key.number,
        )

    @override
    async def ListAssignments(
        self, request: admin_pb2.ListAssignmentsRequest, context: Context
    ) -> admin_pb2.ListAssignmentsResponse:
        services, store = self._services, self._services.store.assignments
        size, after = pages.size(request.page_size), round_details.parse_place(request.page_token)
        which = round_details.parse_filter(request, services.jobs)
        records = await store.list_assignments(which, after=after, limit=size + 1)

        def encode(record: AssignmentRecord) -> admin_pb2.AssignmentDetails:
            current = services.runner.coordinator.find(*record.assignment.id)
            progress = services.progress.get(current) if current is not None else None
            return round_details.assignment(record, services.jobs.state(record.place.job_id).spec, progress)

        page, token = pages.cut(records, size, encode, lambda record: round_details.format_place(record.place))
        total = len(page) if not (after or token) else await store.count_assignments(which)
        return admin_pb2.ListAssignmentsResponse(assignments=page, next_page_token=token, total=total)

    @override
    async def ListModelVersions(
        self, request: admin_pb2.ListModelVersionsRequest, context: Context
    ) -> admin_pb2.ListModelVersionsResponse:
        state = self._services.jobs.find(request.job).state
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.NUMBER)
        after = last[0] if last is not None else request.first_version - 1
        records = await self._services.store.jobs.list_versions(state.job_id, after=after, limit=size + 1)
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
        self, request: admin_pb2.ExportModelRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ExportModelResponse]:
        job = self._services.jobs.find(request.job).state
        number = request.version if request.HasField("version") else job.latest.version
        version = (await self._find_version(job, number)).version
        await self._audit_export(current_operator(), job.job_id, version)
        yield admin_pb2.ExportModelResponse(model=convert.model_ref(version))
        async for message in streams.send(self._services.chunks, self._services.blobs, version.digest, 0):
            yield admin_pb2.ExportModelResponse(data=model_pb2.Chunk.FromString(message).data)

    async def _has_done(self, action: audit.AuditAction, subject: str) -> bool:
        """Return whether the calling operator has done something with a job or model, according to the audit log."""
        which = audit.AuditFilter(current_operator(), action, subject=subject)
        return bool(await self._services.store.audit.list_rows(limit=1, which=which))

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
        attempt = record.state.attempt
        found = await self._services.store.jobs.find_attempts([attempt.key] if attempt is not None else [])
        return self._encode(record, next(iter(found.values()), None))

    def _encode(self, record: JobRecord, last: AttemptRecord | None) -> admin_pb2.Job:
        shown = self._services.halves.training_of(record.state.spec).show(record.state)
        return convert.job(record, self._round(last, {}) if last is not None else None, shown)

    async def _rounds(self, job_id: str, attempts: Sequence[AttemptRecord]) -> list[admin_pb2.Round]:
        """Encode attempts of a job, with the metrics of the versions that they committed."""
        rounds = {attempt.key.round for attempt in attempts}
        versions = await self._services.store.jobs.list_versions_of_rounds(job_id, rounds) if rounds else ()
        metrics = {(record.version.round, record.version.attempt): record.metrics for record in versions}
        return [self._round(attempt, metrics.get(attempt.key[1:], {})) for attempt in attempts]

    def _round(self, record: AttemptRecord, server_metrics: Mapping[str, float]) -> admin_pb2.Round:
        job = self._services.jobs.state(record.key.job_id)
        attempt = job.open_attempt
        if attempt is None or attempt.key != record.key:
            return convert.round_(record, server_metrics)
        found = convert.round_(record, server_metrics, self._services.progress.summarize(job, attempt))
        if (waits := waiting.find(self._services, attempt)) is not None:
            found.waiting.CopyFrom(waits)
        return found

    async def _find_version(self, job: JobState, number: int) -> VersionRecord:
        """Return the version of this number. Raises `RefusedError` if it is unknown, or its file was removed."""
        store = self._services.store
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

    async def _find_attempt(
        self, job: JobState, request: admin_pb2.ShowRoundRequest
    ) -> tuple[AttemptRecord, AttemptRecord]:
        """Return the last attempt at a round, and the one of the request. Raises `RefusedError` if it is unknown."""
        round_, number = validation.number(request.round, "round"), validation.number(request.attempt, "attempt")
        store, latest_first = self._services.store.jobs, AttemptFilter(job.job_id, all_attempts=True, newest_first=True)
        found = await store.list_attempts(latest_first, after=(round_ + 1, 0), limit=1)
        if not found or found[0].key.round != round_:
            current = f"; the last one is {job.attempt.key.round}" if job.attempt is not None else ""
            raise RefusedError(Code.NO_SUCH_ROUND, f"{round_}{current}")
        last = found[0]
        if number in (0, last.key.number):
            return last, last
        key = AttemptKey(job.job_id, round_, number)
        records = await store.find_attempts([key])
        if key not in records:
            raise RefusedError(Code.NO_SUCH_ROUND, f"attempt {number} at round {round_}; it has {last.key.number}")
        return last, records[key]

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
    if not disclosure_of(job.spec).keeps_states:
        return "latest"
    return "kept" if version.state_digest else "initial"


def _check_initial_model(blobs: BlobStore, digest: str, spec: JobSpec) -> int:
    # A local copy does not prove that the object store still has the model.
    if not blobs.exists(digest):
        raise RefusedError(Code.INVALID_MODEL, UPLOAD_FIRST)
    return job_checks.check_initial_model(blobs.fetch(digest), spec)
