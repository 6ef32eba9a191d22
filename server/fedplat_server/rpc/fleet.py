"""The Fleet service (`fleet.proto`), which clients call."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

from grpc import aio
from typing_extensions import override

from fedplat import rounds, wire
from fedplat.rounds import Assignment, AssignmentId, JobState, ModelVersion
from fedplat.rounds.commands import Assign, Refuse, RetryWindow
from fedplat.rounds.disclosure import disclosure_of
from fedplat.rounds.events import AssignmentFailed, ClientCheckedIn
from fedplat.rounds.states import FAILURES, AssignmentState, Reason
from fedplat.wire.v1 import fleet_pb2
from fedplat_server import __version__, logs
from fedplat_server.auth.client_directory import Offer
from fedplat_server.auth.tokens import hash_secret
from fedplat_server.coordination.check_in import RETRY_SOON, wait_for_work
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.protocols import steps
from fedplat_server.protocols.half import ServerHalf
from fedplat_server.protocols.silence import MISSED_HEARTBEATS
from fedplat_server.rpc import convert, streams, validation
from fedplat_server.rpc.enrollment import EnrollmentService
from fedplat_server.rpc.report_intake import ReportIntake
from fedplat_server.rpc.services import Services
from fedplat_server.tracing import ids

Context: TypeAlias = "aio.ServicerContext[Any, Any]"  # a string: generic for the type checker only
DRAINING = RetryWindow(1.0, 5.0)


class FleetService(EnrollmentService):
    """The handlers of the service: each authenticates the client and submits its event to the coordinator."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self._intake = ReportIntake(services)
        self._report_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client id

    @override
    async def CheckIn(self, request: fleet_pb2.CheckInRequest, context: Context) -> fleet_pb2.CheckInResponse:
        validation.protocol_version(request.protocol_version)
        client = await self._client(context)
        labels = validation.labels(request.labels, self._limits)
        trainers = validation.names(request.trainers, "trainer", self._limits)
        evaluators = validation.names(request.evaluators, "evaluator", self._limits)
        version = validation.text(request.software_version, 100)
        client = await self._services.clients.update(client, labels, version)
        self._services.clients.record_offer(client.client_id, Offer(trainers, evaluators))
        self._services.availability.record(client.client_id, client.population)
        self._services.progress.drop_overdue(client.client_id)
        response = fleet_pb2.CheckInResponse(protocol_version=wire.PROTOCOL_VERSION, software_version=__version__)
        if reason := self._services.refuse_if_draining():
            response.refusal.CopyFrom(convert.refusal(reason, DRAINING))
            self._count_check_in(client, reason)
            return response
        event = ClientCheckedIn(
            client_id=client.client_id,
            population=client.population,
            labels=labels,
            trainers=trainers,
            evaluators=evaluators,
            codecs=validation.names(request.codecs, "codec", self._limits),
            algorithms=validation.names(request.algorithms, "algorithm", self._limits),
            features=validation.names(request.features, "feature", self._limits),
            session=client.session_number,
        )
        wait_s = validation.wait_s(request.wait_s, self._limits)
        command = await wait_for_work(self._services.runner, self._services.long_polls, event, wait_s)
        assignment = await self._assignment(command) if isinstance(command, Assign) else None
        await self._services.clients.find(client.client_id)  # it may have been revoked while it waited
        reason = None
        if assignment is not None:
            response.assignment.CopyFrom(assignment)
        elif reason := self._services.refuse_if_draining():
            response.refusal.CopyFrom(convert.refusal(reason, DRAINING))
        elif isinstance(command, Refuse):
            reason = command.reason
            response.refusal.CopyFrom(convert.refusal(reason, command.retry))
        self._count_check_in(client, reason)
        return response

    def _count_check_in(self, client: ClientRecord, reason: Reason | None) -> None:
        instruments = self._services.instruments
        if instruments.populations.is_hidden(client.population):
            return
        result = "assigned" if reason is None else reason.value.lower()
        instruments.check_ins.labels(instruments.populations.of(client.population), result).inc()

    # Download and Upload do not use the generated message classes, which copy file contents: see `serving`.
    @override
    async def Download(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: fleet_pb2.DownloadRequest, context: Context
    ) -> AsyncIterator[bytes]:
        client = await self._client(context)
        if request.sender:
            assignment = await self._find_busy(client, request.token)
            with self._services.quotas.stream(client.client_id):
                async for message in self._half_of(assignment).send_file(assignment, request):
                    yield message
            return
        digest = validation.digest(request.digest)
        if not await self._may_read(client, digest):
            raise RefusedError(Code.NO_SUCH_MODEL, digest)
        count_bytes = self._model_bytes_counter(client, digest)
        with self._services.quotas.stream(client.client_id):
            messages = streams.send(self._services.chunks, self._services.blobs, digest, request.offset)
            async for message in messages:
                await self._services.clients.find(client.client_id)  # it may be revoked meanwhile
                count_bytes(len(message))
                yield message
        await self._note_download(client, digest)

    @override
    async def Upload(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[streams.UploadMessage], context: Context
    ) -> fleet_pb2.UploadResponse:
        messages = streams.enforce_min_rate(request_iterator, self._limits)
        first = await anext(messages, None)  # before the client is authenticated: its signature covers this message
        client = await self._client(context)
        if first is None or first.header is None:
            raise RefusedError(Code.INVALID_REQUEST, "an upload must begin with a header")
        with self._services.quotas.stream(client.client_id):
            assignment = await self._find_busy(client, first.header.token)
            receive = self._half_of(assignment).receive_file if first.header.receiver else self._intake.receive_upload
            received = await receive(assignment, first.header, messages)
        return fleet_pb2.UploadResponse(received_bytes=received)

    @override
    async def QueryUpload(
        self, request: fleet_pb2.QueryUploadRequest, context: Context
    ) -> fleet_pb2.QueryUploadResponse:
        client = await self._client(context)
        assignment = await self._find_busy(client, request.token)
        if request.receiver:
            received = await self._half_of(assignment).count_received(assignment, request)
            return fleet_pb2.QueryUploadResponse(received_bytes=received)
        digest = validation.digest(request.digest)
        received = await asyncio.to_thread(self._services.spool.count_received, assignment.id, digest)
        return fleet_pb2.QueryUploadResponse(received_bytes=received)

    @override
    async def Report(self, request: fleet_pb2.ReportRequest, context: Context) -> fleet_pb2.ReportResponse:
        client = await self._client(context)
        # One report of a client at a time: a duplicate waits for the first, and then gets the same receipt.
        async with self._report_locks.setdefault(client.client_id, asyncio.Lock()):
            return await self._report(client, request)

    async def _report(self, client: ClientRecord, request: fleet_pb2.ReportRequest) -> fleet_pb2.ReportResponse:
        assignment = await self._find(client, request.token)
        if assignment is None:
            return fleet_pb2.ReportResponse(refusal=convert.refusal(Reason.STALE, RETRY_SOON))
        key = assignment.key
        if assignment.is_busy:
            verdict = await self._intake.submit_report(assignment, request)
        else:
            verdict = rounds.verdict_on_report(assignment, request.digest)
        if verdict.reason is Reason.REJECTED_CONFLICT:
            await self._services.conflicts.note(key, client.client_id, assignment.digest, request.digest)
        if verdict.accepted:
            receipt = fleet_pb2.Receipt(job_id=key.job_id, round=key.round, attempt=key.number, digest=request.digest)
            return fleet_pb2.ReportResponse(receipt=receipt)
        return fleet_pb2.ReportResponse(
            refusal=convert.refusal(verdict.reason or Reason.STALE, RETRY_SOON, verdict.text)
        )

    @override
    async def Step(self, request: fleet_pb2.StepRequest, context: Context) -> fleet_pb2.StepResponse:
        client = await self._client(context)
        assignment = await self._find(client, request.token)
        if assignment is None:
            return steps.refuse()
        return await self._half_of(assignment).take_step(client, assignment, request)

    @override
    async def Fail(self, request: fleet_pb2.FailRequest, context: Context) -> fleet_pb2.FailResponse:
        client = await self._client(context)
        reason = convert.reason_from_wire(request.reason)
        if reason is None or reason not in FAILURES:
            raise RefusedError(
                Code.INVALID_REQUEST, f"expected one of {', '.join(sorted(FAILURES))} as the reason of a failure"
            )
        assignment = await self._find(client, request.token)
        if assignment is not None and assignment.is_busy:
            text = validation.text(request.text, self._limits.max_text)
            await self._services.runner.submit(AssignmentFailed(*assignment.id, reason, text, client.session_number))
        return fleet_pb2.FailResponse()

    @override
    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Context) -> fleet_pb2.HeartbeatResponse:
        client = await self._client(context)
        progress = validation.progress(request.progress)
        assignment = await self._find(client, request.token)
        if assignment is None:
            return fleet_pb2.HeartbeatResponse(stop=convert.refusal(Reason.STALE, RETRY_SOON))
        if assignment.is_busy:
            self._services.progress.record(assignment, progress)
            if progress > 0.0:  # it works: it has the model, perhaps from its cache
                self._services.downloads.record(assignment.id)
            wait_s = validation.wait_s(request.wait_s, self._limits)
            with self._services.long_polls.open_heartbeat(*assignment.id) as stopped, contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), wait_s)
            await self._services.clients.find(client.client_id)
            assignment = await self._find(client, request.token)
        if assignment is not None and assignment.is_busy:
            remaining_s = max(assignment.deadline_at - self._services.runner.now, 0.0)
            uploading = assignment.state is AssignmentState.UPLOADING
            proceed = fleet_pb2.Continue(remaining_s=remaining_s, uploading=uploading)
            return fleet_pb2.HeartbeatResponse(proceed=proceed)
        if assignment is not None:
            job_id, now = assignment.key.job_id, self._services.runner.now
            heartbeat_s = self._services.jobs.state(job_id).spec.deadlines.heartbeat_s
            self._services.progress.record_overdue(client.client_id, job_id, now + MISSED_HEARTBEATS * heartbeat_s)
        reason = (assignment.reason if assignment is not None else None) or Reason.STALE
        return fleet_pb2.HeartbeatResponse(stop=convert.refusal(reason, RETRY_SOON))

    async def _client(self, context: Context) -> ClientRecord:
        client = await self._authenticate_client(context)
        logs.bind(client=client.client_id)
        self._services.quotas.request(client.client_id)
        end_call = self._services.clients.begin_call(client.client_id, self._limits.max_calls)

        def on_done(_: object) -> None:
            end_call()

        context.add_done_callback(cast(Any, on_done))
        return client

    async def _assignment(self, command: Assign) -> fleet_pb2.Assignment:
        assignment = AssignmentId(command.key, command.client_id)
        logs.bind(**logs.assignment_fields(assignment))
        job = self._services.jobs.state(command.key.job_id)
        spec, model = job.spec, await self._base_of(job, command.base_version)
        model_bytes = await self._services.inline_models.content(model)
        if model_bytes:
            self._services.downloads.record(assignment)
            self._count_model_bytes(job, "inline", len(model_bytes))
        message = fleet_pb2.Assignment(
            token=command.token,
            job_id=job.job_id,
            job_name=spec.name,
            round=command.key.round,
            attempt=command.key.number,
            model=convert.model_ref(model),
            config={name: convert.value(scalar) for name, scalar in spec.client_config.items()},
            training_timeout_s=command.training_timeout_s,
            upload_timeout_s=command.upload_timeout_s,
            heartbeat_s=spec.deadlines.heartbeat_s,
            model_bytes=model_bytes,
            delta=None if model_bytes else convert.model_delta(model, spec),
            traceparent=ids.traceparent(assignment, spec.num_wanted) if self._services.is_tracing else "",
        )
        message.MergeFrom(self._services.halves.of(job, command.kind).make_task(spec))
        message.MergeFrom(await self._services.halves.training_of(job.spec).set_up(job, command.key))
        return message

    def _half_of(self, assignment: Assignment) -> ServerHalf:
        """Return the half of the training of an assignment's job."""
        return self._services.halves.training_of(self._services.jobs.state(assignment.key.job_id).spec)

    async def _note_download(self, client: ClientRecord, digest: str) -> None:
        """Record that a client has received a whole file, if it is the model of its assignment or the step to it."""
        coordinator = self._services.runner.coordinator
        key = coordinator.assignment_of(client.client_id)
        assignment = coordinator.find(key, client.client_id) if key is not None else None
        if key is None or assignment is None:
            return
        base = await self._base_of(self._services.jobs.state(key.job_id), assignment.base_version)
        if digest in (base.digest, base.delta_digest):
            self._services.downloads.record(assignment.id)

    async def _base_of(self, job: JobState, version: int) -> ModelVersion:
        """Return the version that an assignment starts from; not the latest if a late client reclaims it."""
        base = job.latest if job.latest.version == version else None
        base = base or await self._services.store.jobs.find_version(job.job_id, version)
        assert base is not None
        return base

    def _model_bytes_counter(self, client: ClientRecord, digest: str) -> Callable[[int], None]:
        """Return a function that counts bytes of a file as sent to a client, for the job that it works for."""
        coordinator = self._services.runner.coordinator
        key = coordinator.assignment_of(client.client_id)
        job = coordinator.jobs.get(key.job_id) if key is not None else None
        form = "delta" if job is not None and digest == job.latest.delta_digest else "file"
        return functools.partial(self._count_model_bytes, job, form)

    def _count_model_bytes(self, job: JobState | None, form: str, num_bytes: int) -> None:
        instruments = self._services.instruments
        if job is None or disclosure_of(job.spec).shows_cohorts:
            labels = instruments.jobs.of(job.job_id if job is not None else "")
            instruments.model_bytes.labels(*labels, form).inc(num_bytes)

    async def _may_read(self, client: ClientRecord, digest: str) -> bool:
        for job in self._services.runner.coordinator.jobs.values():
            latest = job.latest
            if digest in (latest.digest, latest.delta_digest) and job.spec.population == client.population:
                return True
        return client.population in await self._services.store.jobs.find_populations(digest)

    async def _find(self, client: ClientRecord, token: str) -> Assignment | None:
        """Return the assignment of a token, however old; None if it is not this client's."""
        found = await self._look_up(client, token)
        if found is not None:
            logs.bind(**logs.assignment_fields(found.id))
        return found

    async def _look_up(self, client: ClientRecord, token: str) -> Assignment | None:
        coordinator, token_hash = self._services.runner.coordinator, hash_secret(token)
        key = coordinator.assignment_of(client.client_id)
        current = coordinator.find(key, client.client_id) if key is not None else None
        if current is not None and secrets.compare_digest(current.token_hash, token_hash):
            return current
        stored = await self._services.store.jobs.find_assignment(token_hash)
        if stored is None or stored.client_id != client.client_id:
            return None
        return coordinator.find(*stored.id) or stored

    async def _find_busy(self, client: ClientRecord, token: str) -> Assignment:
        assignment = await self._find(client, token)
        if assignment is None:
            raise RefusedError(Code.STALE_ASSIGNMENT)
        if not assignment.is_busy:
            raise RefusedError(Code.STALE_ASSIGNMENT, assignment.reason or assignment.state)
        return assignment
