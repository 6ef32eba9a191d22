"""The service `Jobs`: submits, shows and controls jobs, and filters their list."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import structs
from typing_extensions import override

from fedplat.config.loaded_plugins import LoadedPlugins, describe_versions
from fedplat.config.plugins import Plugins
from fedplat.job import JobSpec, digest_job
from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.events import JobAction, OperatorCommand, SpecChanged
from fedplat.rounds.states import ENDED_JOBS, JobStatus
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.auth.client_directory import new_id
from fedplat_server.coordination import job_checks
from fedplat_server.coordination.job_checks import Budgets
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.records import JobRecord
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.records import audit
from fedplat_server.records.audit import AuditEntry
from fedplat_server.rpc import pages
from fedplat_server.rpc.interceptor import Context
from fedplat_server.rpc.job_registry import JobRegistry
from fedplat_server.rpc.job_view import JobView
from fedplat_server.rpc.operator_access import current_operator
from fedplat_server.storage.blobs import BlobStore

_AUDIT_ACTIONS = {
    JobAction.START: audit.AuditAction.JOB_STARTED,
    JobAction.PAUSE: audit.AuditAction.JOB_PAUSED,
    JobAction.RESUME: audit.AuditAction.JOB_RESUMED,
    JobAction.CANCEL: audit.AuditAction.JOB_CANCELLED,
}
_Result = TypeVar("_Result")
UPLOAD_FIRST = "upload it first (UploadModel)"


@dataclasses.dataclass(eq=False, repr=False)
class JobFiles:
    """Reads job files of at most `max_bytes`, which may name `plugins`, and these evaluators and trainers."""

    plugins: Plugins
    max_bytes: int
    evaluators: Sequence[str]
    trainers: Sequence[str]
    halves: ServerHalves
    _parsing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock, init=False)

    async def read(self, text: str) -> JobSpec:
        """Return the job of a new file. Raises `RefusedError` if it is not valid, or this server cannot run it."""
        spec = await self._run_alone(job_checks.parse_submitted, text, self.max_bytes, self.plugins)
        job_checks.check_is_runnable(spec, self.evaluators, self.trainers)
        await self.halves.training_of(spec).check_job(spec)
        return spec

    async def change(self, text: str, changes: Sequence[str]) -> tuple[str, JobSpec]:
        """Return a file with other values of keys that may change, and its job. Raises `RefusedError`."""
        return await asyncio.to_thread(job_checks.change_submitted, text, changes, self.max_bytes, self.plugins)

    async def _run_alone(self, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Run a function in a thread, one at a time, also if its call has ended: a thread cannot be cancelled."""
        async with self._parsing:
            running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])
                raise


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class JobsService(admin_pb2_grpc.JobsServicer):
    """The methods that create, show and command jobs."""

    jobs: JobRegistry
    view: JobView
    files: JobFiles
    plugins: LoadedPlugins
    store: Store
    runner: Runner
    budgets: Budgets
    blobs: BlobStore

    @override
    async def CreateJob(self, request: admin_pb2.CreateJobRequest, context: Context) -> admin_pb2.Job:
        spec = await self.files.read(request.job_file)
        digest = validation.digest(request.initial_digest)
        if not await self._has_done(audit.AuditAction.MODEL_UPLOADED, digest):  # or the version of a job of others
            raise RefusedError(Code.INVALID_MODEL, UPLOAD_FIRST)
        with self.blobs.protect(digest):
            size_bytes = await asyncio.to_thread(_check_initial_model, self.blobs, digest, spec)
            initial = ModelVersion(version=0, round=0, attempt=0, digest=digest, size_bytes=size_bytes)
            used = self.plugins.find_used(spec, spec.config)
            named = await asyncio.to_thread(digest_job, spec, digest)
            state = JobState(job_id=new_id("j"), spec=spec, latest=initial, plugins=used, digest=named)
            entry = AuditEntry(current_operator(), audit.AuditAction.JOB_CREATED, state.job_id, {"name": spec.name})
            key = validation.key(request.idempotency_key)
            record = await self.budgets.create_job(state, request.job_file, key, [entry])
        created = record.state.job_id
        if created != state.job_id and not await self._has_done(audit.AuditAction.JOB_CREATED, created):
            raise RefusedError(Code.INVALID_REQUEST, "idempotency_key was used by another operator; choose a new one")
        self.jobs.add(record.with_digest(state.digest), (), digest, creator=current_operator())
        return await self.view.show(self.jobs.find(record.state.job_id))

    @override
    async def ListJobs(self, request: admin_pb2.ListJobsRequest, context: Context) -> admin_pb2.ListJobsResponse:
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        jobs = self.jobs
        found = select(jobs, JobFilter.of(request), after)
        states = found.rest[: size + 1]
        keys = [state.attempt.key for state in states[:size] if state.attempt is not None]
        attempts = await self.store.jobs.find_attempts(keys)

        def encode(state: JobState) -> admin_pb2.Job:
            last = attempts.get(state.attempt.key) if state.attempt is not None else None
            return self.view.encode(dataclasses.replace(jobs.record(state.job_id), state=state, job_file=""), last)

        page, token = pages.cut(states, size, encode, lambda state: state.job_id)
        return admin_pb2.ListJobsResponse(
            jobs=page, next_page_token=token, total=found.total, num_by_status=found.num_by_status
        )

    @override
    async def ShowJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        return await self.view.show(self.jobs.find(request.job))

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
        record = self.jobs.find(request.job)
        job = record.state
        if job.status in ENDED_JOBS:
            raise RefusedError(Code.ILLEGAL_ACTION, f"cannot change a job that is {job.status}")
        if record.problem:
            raise RefusedError(Code.ILLEGAL_ACTION, f"this server cannot read the job: {record.problem}")
        text, spec = await self.files.change(record.job_file, request.changes)
        spec = structs.replace(job.spec, retention=spec.retention, retry=spec.retry)
        details = {"name": job.spec.name, "changes": "; ".join(request.changes)[:1000]}
        entry = AuditEntry(current_operator(), audit.AuditAction.JOB_CHANGED, job.job_id, details)
        await self.store.jobs.change_job_file(job.job_id, text, [entry])
        self.jobs.change_file(job.job_id, text)
        changed, initial = dataclasses.replace(record, job_file=text), self.jobs.initial_digest(job.job_id)
        digest = await job_checks.digest_stored(changed, initial, self.plugins.table)
        verdict = await self.runner.submit(SpecChanged(job.job_id, spec, digest))
        if not verdict.accepted:
            raise RefusedError(Code.ILLEGAL_ACTION, verdict.text)
        return await self.view.show(self.jobs.find(job.job_id))

    async def _has_done(self, action: audit.AuditAction, subject: str) -> bool:
        """Return whether the calling operator has done something with a job or model, according to the audit log."""
        which = audit.AuditFilter(current_operator(), action, subject=subject)
        return bool(await self.store.audit.list_rows(limit=1, which=which))

    async def _command(self, name: str, action: JobAction) -> admin_pb2.Job:
        record = self.jobs.find(name)
        job_id, before = record.state.job_id, record.state.plugins
        loaded = self.plugins.select(before)
        details = {"name": name}
        if action in (JobAction.START, JobAction.RESUME) and loaded != before:
            details["plugins"] = describe_versions(loaded)
        entry = AuditEntry(current_operator(), _AUDIT_ACTIONS[action], job_id, details)
        command = OperatorCommand(job_id, action, loaded, record.problem)
        verdict = await self.runner.submit(command, audit=[entry])
        if not verdict.accepted:
            raise RefusedError(Code.ILLEGAL_ACTION, verdict.text)
        return await self.view.show(self.jobs.find(job_id))


def _check_initial_model(blobs: BlobStore, digest: str, spec: JobSpec) -> int:
    # A local copy does not prove that the object store still has the model.
    if not blobs.exists(digest):
        raise RefusedError(Code.INVALID_MODEL, UPLOAD_FIRST)
    return job_checks.check_initial_model(blobs.fetch(digest), spec)


_STATUSES = {wire: status for status, wire in convert.STATUSES.items()}


@dataclasses.dataclass(frozen=True)
class JobFilter:
    """The jobs of a list: those that satisfy all conditions."""

    statuses: frozenset[JobStatus] = frozenset()
    population: str = ""
    search: str = ""
    since_unix_s: float = 0.0
    newest_first: bool = False

    @classmethod
    def of(cls, request: admin_pb2.ListJobsRequest) -> JobFilter:
        """Return the filter of a request. Raises `RefusedError` if it is not valid."""
        unknown = [status for status in request.statuses if status not in _STATUSES]
        if unknown:
            raise RefusedError(
                Code.INVALID_REQUEST, f"the status {unknown[0]} is unknown; expected {', '.join(JobStatus)}"
            )
        return cls(
            statuses=frozenset(_STATUSES[status] for status in request.statuses),
            population=validation.name(request.population, "population") if request.population else "",
            search=validation.search(request.search).lower(),
            since_unix_s=validation.since(request.since_unix_s),
            newest_first=request.newest_first,
        )

    def matches(self, state: JobState, record: JobRecord) -> bool:
        """Return whether a job satisfies all conditions but that on its status."""
        spec = state.spec
        return (
            (not self.population or spec.population == self.population)
            and record.created_unix_s >= self.since_unix_s
            and (not self.search or self.search in spec.name.lower() or self.search in state.job_id)
        )


@dataclasses.dataclass(frozen=True)
class JobList:
    """The jobs of a list: those after a page token, the number of all, and the numbers by status in any status."""

    rest: Sequence[JobState]
    total: int
    num_by_status: Counter[str]


def select(jobs: JobRegistry, which: JobFilter, after: str) -> JobList:
    """Return the jobs that satisfy a filter; those after the job `after` ("": all; none if it is unknown)."""
    found = jobs.select(which.matches, newest_first=which.newest_first)
    num_by_status = Counter(state.status.value for state in found)
    if which.statuses:
        found = [state for state in found if state.status in which.statuses]
    return JobList(_after(jobs, found, after, newest_first=which.newest_first), len(found), num_by_status)


def _after(jobs: JobRegistry, found: Sequence[JobState], after: str, *, newest_first: bool) -> Sequence[JobState]:
    if not after:
        return found
    last = jobs.position(after)
    if last is None:
        return ()
    for index, state in enumerate(found):  # its status may have changed since, so that it is no longer in the list
        position = jobs.position(state.job_id)
        assert position is not None
        if position < last if newest_first else position > last:
            return found[index:]
    return ()
