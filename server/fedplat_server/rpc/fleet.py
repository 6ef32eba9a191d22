"""The handlers of the Fleet service (`fleet.proto`) for clients that work: heartbeats, files, reports and steps."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary

from typing_extensions import override

from fedplat import rounds
from fedplat.rounds import Assignment, events, states
from fedplat.rounds.states import Reason
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server import config, errors
from fedplat_server.auth import addresses
from fedplat_server.auth.rate_limits import Quotas
from fedplat_server.config import Limits
from fedplat_server.coordination.long_polls import RETRY_SOON, LongPolls
from fedplat_server.coordination.progress import Downloads, ProgressTracker
from fedplat_server.coordination.revocation import Conflicts
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.records import ClientRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, streams, validation
from fedplat_server.messages.streams import UploadMemory
from fedplat_server.protocols import half, registry, relay
from fedplat_server.rpc import check_in, client_access, interceptor, report_intake
from fedplat_server.rpc.client_access import AssignmentFinder, ClientAccess
from fedplat_server.rpc.interceptor import Context


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class FleetService(fleet_pb2_grpc.FleetServicer):
    """The methods with which clients get models, upload updates and take steps."""

    access: client_access.ClientAccess
    finder: client_access.AssignmentFinder
    quotas: Quotas
    limits: config.Limits
    halves: registry.ServerHalves
    intake: report_intake.ReportIntake
    models: check_in.ClientModels

    # Download and Upload do not use the generated message classes, which copy file contents: see `serving`.
    @override
    async def Download(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: fleet_pb2.DownloadRequest, context: interceptor.Context
    ) -> AsyncIterator[bytes]:
        client = await self.access.begin_call(context)
        if request.sender:
            assignment = await self.finder.find_busy(client, request.token)
            with self.quotas.stream(client.client_id):
                async for message in self._half_of(assignment).send_file(assignment, request):
                    yield message
            return
        digest = validation.digest(request.digest)
        await self.models.require_access(client, digest)
        with self.quotas.stream(client.client_id):
            found = self.models.send(client, digest, request.offset, request.length)
            async with contextlib.aclosing(found) as messages:
                async for message in messages:
                    yield message
        if not request.length:  # the last of several ranges has none
            await self.models.note_download(client, digest)

    @override
    async def Upload(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[streams.UploadMessage], context: interceptor.Context
    ) -> fleet_pb2.UploadResponse:
        messages = streams.enforce_min_rate(request_iterator, self.limits)
        first = await anext(messages, None)  # before the client is authenticated: its signature covers this message
        client = await self.access.begin_call(context)
        if first is None or first.header is None:
            raise errors.RefusedError(errors.Code.INVALID_REQUEST, "an upload must begin with a header")
        with self.quotas.stream(client.client_id):
            assignment = await self.finder.find_busy(client, first.header.token)
            receive = self._half_of(assignment).receive_file if first.header.receiver else self.intake.receive_upload
            received = await receive(assignment, first.header, messages)
        return fleet_pb2.UploadResponse(received_bytes=received)

    @override
    async def QueryUpload(
        self, request: fleet_pb2.QueryUploadRequest, context: interceptor.Context
    ) -> fleet_pb2.QueryUploadResponse:
        client = await self.access.begin_call(context)
        assignment = await self.finder.find_busy(client, request.token)
        if request.receiver:
            received = await self._half_of(assignment).count_received(assignment, request)
            return fleet_pb2.QueryUploadResponse(received_bytes=received)
        received = await self.intake.count_received(assignment, validation.upload_name(request))
        return fleet_pb2.QueryUploadResponse(received_bytes=received, max_calls=self.intake.count_calls())

    @override
    async def Step(self, request: fleet_pb2.StepRequest, context: interceptor.Context) -> fleet_pb2.StepResponse:
        client = await self.access.begin_call(context)
        assignment = await self.finder.find(client, request.token)
        if assignment is None:
            return half.refuse_step()
        return await self._half_of(assignment).take_step(client, assignment, request)

    def _half_of(self, assignment: Assignment) -> half.ServerHalf:
        """Return the half of the training of an assignment's job."""
        return self.halves.training_of(self.finder.job_of(assignment).spec)


QUICK_S = 5.0
"""The age of an attempt up to which a report waits for the next assignment of its client."""


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReportService(fleet_pb2_grpc.FleetServicer):
    """The method with which clients report the results of their work."""

    access: client_access.ClientAccess
    finder: client_access.AssignmentFinder
    runner: Runner
    intake: report_intake.ReportIntake
    conflicts: Conflicts
    memory: UploadMemory
    check_ins: check_in.CheckIns

    def __post_init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client id

    @override
    async def Report(self, request: fleet_pb2.ReportRequest, context: interceptor.Context) -> fleet_pb2.ReportResponse:
        client = await self.access.begin_call(context)
        # One report of a client at a time: a duplicate waits for the first, and then gets the same receipt.
        async with self._locks.setdefault(client.client_id, asyncio.Lock()):
            response = await self._report(client, request)
        if response.HasField("receipt") and request.HasField("check_in") and self._may_wait(response.receipt):
            interceptor.INCOMING.get().request = b""
            assignment = await self.check_ins.next_assignment(client, request.check_in)
            if assignment is not None:
                response.next.CopyFrom(assignment)
        return response

    def _may_wait(self, receipt: fleet_pb2.Receipt) -> bool:
        """Return whether the attempt of a report began so recently that the next assignment may come soon.

        The memory of a report is held until it is answered: so no report waits that comes from a gateway, nor if those
        that wait hold half of what reports may have.
        """
        if not self.memory.reports.is_half_free or addresses.is_forwarded(interceptor.INCOMING.get().metadata.items()):
            return False
        job = self.runner.coordinator.jobs.get(receipt.job_id)
        attempt = job.attempt if job is not None else None
        return attempt is not None and self.runner.now - attempt.opened_at < QUICK_S

    async def _report(self, client: ClientRecord, request: fleet_pb2.ReportRequest) -> fleet_pb2.ReportResponse:
        assignment = await self.finder.find(client, request.token)
        if assignment is None:
            return fleet_pb2.ReportResponse(refusal=convert.refusal(Reason.STALE, RETRY_SOON))
        key = assignment.key
        if assignment.is_busy:
            verdict = await self.intake.submit_report(assignment, request)
        else:
            verdict = rounds.verdict_on_report(assignment, request.digest)
        if verdict.reason is Reason.REJECTED_CONFLICT:
            await self.conflicts.note(key, client.client_id, assignment.digest, request.digest)
        if verdict.accepted:
            receipt = fleet_pb2.Receipt(job_id=key.job_id, round=key.round, attempt=key.number, digest=request.digest)
            return fleet_pb2.ReportResponse(receipt=receipt)
        return fleet_pb2.ReportResponse(
            refusal=convert.refusal(verdict.reason or Reason.STALE, RETRY_SOON, verdict.text)
        )


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class WorkingClientsService(fleet_pb2_grpc.FleetServicer):
    """The methods with which clients show that they work on their assignments, or do not any more."""

    access: ClientAccess
    finder: AssignmentFinder
    limits: Limits
    runner: Runner
    long_polls: LongPolls
    progress: ProgressTracker
    downloads: Downloads

    @override
    async def Fail(self, request: fleet_pb2.FailRequest, context: Context) -> fleet_pb2.FailResponse:
        client = await self.access.begin_call(context)
        reason = convert.reason_from_wire(request.reason)
        if reason is None or reason not in states.FAILURES:
            raise RefusedError(
                Code.INVALID_REQUEST, f"expected one of {', '.join(sorted(states.FAILURES))} as the reason of a failure"
            )
        assignment = await self.finder.find(client, request.token)
        if assignment is not None and assignment.is_busy:
            text = validation.text(request.text, self.limits.max_text)
            await self.runner.submit(events.AssignmentFailed(*assignment.id, reason, text, client.session_number))
        return fleet_pb2.FailResponse()

    @override
    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Context) -> fleet_pb2.HeartbeatResponse:
        client = await self.access.begin_call(context)
        progress = validation.progress(request.progress)
        assignment = await self.finder.find(client, request.token)
        if assignment is None:
            return fleet_pb2.HeartbeatResponse(stop=convert.refusal(states.Reason.STALE, RETRY_SOON))
        if assignment.is_busy:
            self.progress.record(assignment, progress)
            if progress > 0.0:  # it works: it has the model, perhaps from its cache
                self.downloads.record(assignment.id)
            wait_s = validation.wait_s(request.wait_s, self.limits)
            with self.long_polls.open_heartbeat(*assignment.id) as stopped, contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), wait_s)
            await self.access.require(client)
            assignment = await self.finder.find(client, request.token)
        if assignment is not None and assignment.is_busy:
            remaining_s = max(assignment.deadline_at - self.runner.now, 0.0)
            uploading = assignment.state is states.AssignmentState.UPLOADING
            proceed = fleet_pb2.Continue(remaining_s=remaining_s, uploading=uploading)
            return fleet_pb2.HeartbeatResponse(proceed=proceed)
        if assignment is not None:
            job_id, now = assignment.key.job_id, self.runner.now
            heartbeat_s = self.finder.job_of(assignment).spec.deadlines.heartbeat_s
            self.progress.record_overdue(client.client_id, job_id, now + relay.MISSED_HEARTBEATS * heartbeat_s)
        reason = (assignment.reason if assignment is not None else None) or states.Reason.STALE
        return fleet_pb2.HeartbeatResponse(stop=convert.refusal(reason, RETRY_SOON))
