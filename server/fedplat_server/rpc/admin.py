"""The service of `admin.proto`: what operators say."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from grpc import aio

from fedplat import wire
from fedplat.errors import JobFileError, ModelError
from fedplat.job import JobSpec, parse_job
from fedplat.model import Parameters
from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.events import Action, OperatorCommand
from fedplat.rounds.states import ENDED_JOBS
from fedplat.wire.v1 import admin_pb2
from fedplat_server import __version__, audit, files, spool_file
from fedplat_server.audit import AuditEntry
from fedplat_server.bounded_audit import Recent
from fedplat_server.cluster import hop
from fedplat_server.rpc import convert, gate, pages, requests, streams
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.rpc.members import MembersMethods
from fedplat_server.rpc.operators import OperatorMethods
from fedplat_server.rpc.privacy import PrivacyMethods
from fedplat_server.rpc.versions import VersionMethods
from fedplat_server.services import Services
from fedplat_server.store.port import JobRecord

Context: TypeAlias = "aio.ServicerContext[Any, Any]"  # a string: generic for the type checker only

_NOTED = {
    Action.START: audit.Action.JOB_STARTED,
    Action.PAUSE: audit.Action.JOB_PAUSED,
    Action.RESUME: audit.Action.JOB_RESUMED,
    Action.CANCEL: audit.Action.JOB_CANCELLED,
}


class AdminService(VersionMethods, MembersMethods, OperatorMethods, PrivacyMethods):
    """Every method: find the job, ask or tell, encode."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._exported = Recent()

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        """How the daemon is."""
        services = self._services
        coordinator, certificates = services.runner.coordinator, services.certificates
        jobs = Counter(record.state.status.value for record in services.jobs.all())
        return admin_pb2.GetStatusResponse(
            software_version=__version__,
            protocol_version=wire.PROTOCOL_VERSION,
            uptime_s=time.time() - services.started_unix_s,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            num_clients=await services.store.count_clients(),
            num_waiting=len(coordinator.room.clients),
            num_busy=coordinator.num_busy,
            num_jobs=dict(jobs),
            process_id=os.getpid(),
            evaluators=services.evaluation.names,
            trainers=sorted(services.config.trainers),
            num_storage_full=files.num_full(),
            leader=services.lease.holder,
            leader_address=services.lease.address,
            term=services.lease.term,
            gateway=hop.of(context, services.lease.secret).gateway,
            insecure=services.certificates is None,
            certificate_expires_unix_s=certificates.loaded.expires.timestamp() if certificates else 0.0,
            certificate_days_left=certificates.days_left if certificates else 0.0,
        )

    async def UploadModel(
        self, request_iterator: AsyncIterator[admin_pb2.UploadModelRequest], context: Context
    ) -> admin_pb2.UploadModelResponse:
        """Stores an initial model."""
        limits = self._services.config.limits
        parts = (part.data async for part in streams.steadily(request_iterator, limits))
        blob = await streams.store_model(self._services.blobs, parts, limits.max_model_bytes)
        details = {"size_bytes": blob.size_bytes}
        noted = AuditEntry(gate.caller(), audit.Action.MODEL_UPLOADED, blob.digest, details)
        await self._services.store.append_audit([noted])
        return admin_pb2.UploadModelResponse(digest=blob.digest, size_bytes=blob.size_bytes)

    async def CreateJob(self, request: admin_pb2.CreateJobRequest, context: Context) -> admin_pb2.Job:
        """Makes a job in state DRAFT."""
        services = self._services
        spec = await asyncio.to_thread(self._parse, request.job_file)
        self._check_evaluator(spec)
        self._check_trainers(spec)
        self._check_durability(spec)
        digest = requests.digest(request.initial_digest)
        with services.blobs.held(digest):
            record = await self._create(request, spec, digest)
        services.jobs.add(record)
        return await self._job(services.jobs.find(record.state.job_id))

    async def _create(self, request: admin_pb2.CreateJobRequest, spec: JobSpec, digest: str) -> JobRecord:
        services = self._services
        size_bytes = await asyncio.to_thread(self._check_model, digest, spec)
        state = JobState(
            job_id=services.new_id("j"),
            spec=spec,
            latest=ModelVersion(version=0, round=0, attempt=0, digest=digest, size_bytes=size_bytes),
        )
        entry = AuditEntry(gate.caller(), audit.Action.JOB_CREATED, state.job_id, {"name": spec.name})
        key = requests.key(request.idempotency_key)
        return await services.budgets.create_job(state, request.job_file, key, [entry])

    async def ListJobs(self, request: admin_pb2.ListJobsRequest, context: Context) -> admin_pb2.ListJobsResponse:
        """A page of the jobs, without their files."""
        size, after = pages.size(request.page_size), pages.token(request.page_token, pages.ID)
        records = self._services.jobs.all(after)[: size + 1]
        jobs = [await self._job(dataclasses.replace(record, job_file="")) for record in records]
        page, token = pages.cut(jobs, size, lambda job: job, lambda job: job.job_id)
        return admin_pb2.ListJobsResponse(jobs=page, next_page_token=token)

    async def ShowJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        """One job."""
        return await self._job(self._services.jobs.find(request.job))

    async def StartJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        """Starts a draft."""
        return await self._act(request.job, Action.START)

    async def PauseJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        """Pauses a running job: the open attempt is abandoned, its clients are told to stop."""
        return await self._act(request.job, Action.PAUSE)

    async def ResumeJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        """Lets a paused job go on."""
        return await self._act(request.job, Action.RESUME)

    async def CancelJob(self, request: admin_pb2.JobRequest, context: Context) -> admin_pb2.Job:
        """Ends a job for good."""
        return await self._act(request.job, Action.CANCEL)

    async def WatchJob(self, request: admin_pb2.WatchJobRequest, context: Context) -> AsyncIterator[admin_pb2.JobEvent]:
        """The job's history, then every new row, until the job has ended and its last version is scored."""
        services = self._services
        job_id = services.jobs.find(request.job).state.job_id
        sequence = min(request.after_sequence, 2**62)  # more than any database counts to
        while True:
            changed = services.jobs.next_change(job_id)
            over = services.jobs.state(job_id).status in ENDED_JOBS and not services.evaluation.is_pending(job_id)
            rows = await services.store.history(job_id, sequence)
            for record in rows:
                sequence = record.sequence
                yield convert.event(record)
            if rows:
                continue
            if over:
                return
            if services.draining:  # an end without an error would say that the job has ended
                raise RefusedError(Code.DRAINING)
            await changed.wait()

    async def ListRounds(self, request: admin_pb2.ListRoundsRequest, context: Context) -> admin_pb2.ListRoundsResponse:
        """A page of the attempts of a job."""
        store, job_id = self._services.store, self._services.jobs.find(request.job).state.job_id
        size, given = pages.size(request.page_size), pages.numbers(request.page_token, pages.PAIR)
        after = (given[0], given[1]) if given is not None else None
        attempts = await store.list_attempts(job_id, all_attempts=request.all_attempts, after=after, limit=size + 1)
        if not attempts:
            return admin_pb2.ListRoundsResponse()
        versions = await store.versions_of_rounds(job_id, attempts[0].key.round, attempts[-1].key.round)
        scores = {(record.version.round, record.version.attempt): record.metrics for record in versions}
        rounds, token = pages.cut(
            attempts,
            size,
            lambda attempt: convert.round_(attempt, scores.get(attempt.key[1:], {})),
            lambda attempt: f"{attempt.key.round}.{attempt.key.number}",
        )
        return admin_pb2.ListRoundsResponse(rounds=rounds, next_page_token=token)

    async def _act(self, name: str, action: Action) -> admin_pb2.Job:
        job_id = self._services.jobs.find(name).state.job_id
        entry = AuditEntry(gate.caller(), _NOTED[action], job_id, {"name": name})
        verdict = await self._services.runner.submit(OperatorCommand(job_id, action), audit=[entry])
        if not verdict.accepted:
            raise RefusedError(Code.ILLEGAL_ACTION, verdict.text)
        return await self._job(self._services.jobs.find(job_id))

    async def _job(self, record: JobRecord) -> admin_pb2.Job:
        last = await self._services.store.last_attempt(record.state.job_id)
        return convert.job(record, convert.round_(last, {}) if last is not None else None)

    def _parse(self, job_file: str) -> JobSpec:
        limit = self._services.config.limits.max_job_file_bytes
        if len(job_file.encode()) > limit:
            raise RefusedError(Code.INVALID_JOB_FILE, f"it has more than {limit} bytes")
        try:
            return parse_job(job_file)
        except JobFileError as exc:
            raise RefusedError(Code.INVALID_JOB_FILE, str(exc)) from exc

    def _check_durability(self, spec: JobSpec) -> None:
        if spec.durability == "memory" and not spool_file.CAN_KEEP_IN_MEMORY:
            raise RefusedError(
                Code.INVALID_JOB_FILE,
                'durability = "memory": the server\'s platform has no files in memory (memfd, Linux); use "spool"',
            )

    def _check_evaluator(self, spec: JobSpec) -> None:
        wanted, names = spec.evaluation.server, self._services.evaluation.names
        if wanted is not None and wanted not in names:
            have = f"it has {', '.join(names)}" if names else "it has none"
            raise RefusedError(
                Code.NO_SUCH_EVALUATOR,
                f"{wanted!r}; {have}. Start it with --evaluator {wanted}=module:function, "
                "or leave evaluation.server out of the job file",
            )

    def _check_trainers(self, spec: JobSpec) -> None:
        names = sorted(self._services.config.trainers)
        for table, learning in (("warm_start", spec.warm_start), ("server_step", spec.server_step)):
            if learning is not None and learning.trainer not in names:
                have = f"it has {', '.join(names)}" if names else "it has none"
                raise RefusedError(
                    Code.NO_SUCH_TRAINER,
                    f"{table}.trainer = {learning.trainer!r}; {have}. Start it with --trainer {learning.trainer}="
                    f"module:object, or leave [{table}] out of the job file",
                )

    def _check_model(self, digest: str, spec: JobSpec) -> int:
        path = self._services.blobs.path(digest)
        try:
            parameters = Parameters.open(path)
        except FileNotFoundError as exc:
            raise RefusedError(Code.INVALID_MODEL, "upload it first (UploadModel)") from exc
        except ModelError as exc:
            raise RefusedError(Code.INVALID_MODEL, str(exc)) from exc
        if parameters.schema.num_floating == 0:
            raise RefusedError(Code.INVALID_MODEL, "it has no floating-point tensor to train")
        if not parameters.is_finite():
            raise RefusedError(Code.INVALID_MODEL, "it holds NaN or infinite values")
        if misfit := spec.rule().counterpart.misfit(parameters.schema):
            raise RefusedError(Code.INVALID_MODEL, misfit)
        return path.stat().st_size
