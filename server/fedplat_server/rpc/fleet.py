"""The handlers of the Fleet service (`fleet.proto`) that take the work of clients: files, reports and steps."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from weakref import WeakValueDictionary

from typing_extensions import override

from fedplat import rounds
from fedplat.rounds import Assignment
from fedplat.rounds.states import Reason
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server import config, errors
from fedplat_server.auth.rate_limits import Quotas
from fedplat_server.coordination.conflicts import Conflicts
from fedplat_server.coordination.long_polls import RETRY_SOON
from fedplat_server.database.clients import ClientRecord
from fedplat_server.messages import convert, streams, validation
from fedplat_server.protocols import half, registry, steps
from fedplat_server.rpc import client_access, client_models, handlers, report_intake


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class FleetService(fleet_pb2_grpc.FleetServicer):
    """The methods with which clients get models and send the results of their work."""

    access: client_access.ClientAccess
    finder: client_access.AssignmentFinder
    quotas: Quotas
    limits: config.Limits
    halves: registry.ServerHalves
    intake: report_intake.ReportIntake
    models: client_models.ClientModels
    conflicts: Conflicts

    def __post_init__(self) -> None:
        self._report_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client id

    # Download and Upload do not use the generated message classes, which copy file contents: see `serving`.
    @override
    async def Download(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: fleet_pb2.DownloadRequest, context: handlers.Context
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
            async with contextlib.aclosing(self.models.send(client, digest, request.offset)) as messages:
                async for message in messages:
                    yield message
        await self.models.note_download(client, digest)

    @override
    async def Upload(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[streams.UploadMessage], context: handlers.Context
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
        self, request: fleet_pb2.QueryUploadRequest, context: handlers.Context
    ) -> fleet_pb2.QueryUploadResponse:
        client = await self.access.begin_call(context)
        assignment = await self.finder.find_busy(client, request.token)
        if request.receiver:
            received = await self._half_of(assignment).count_received(assignment, request)
            return fleet_pb2.QueryUploadResponse(received_bytes=received)
        digest = validation.digest(request.digest)
        received = await self.intake.count_received(assignment, digest)
        return fleet_pb2.QueryUploadResponse(received_bytes=received)

    @override
    async def Report(self, request: fleet_pb2.ReportRequest, context: handlers.Context) -> fleet_pb2.ReportResponse:
        client = await self.access.begin_call(context)
        # One report of a client at a time: a duplicate waits for the first, and then gets the same receipt.
        async with self._report_locks.setdefault(client.client_id, asyncio.Lock()):
            return await self._report(client, request)

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

    @override
    async def Step(self, request: fleet_pb2.StepRequest, context: handlers.Context) -> fleet_pb2.StepResponse:
        client = await self.access.begin_call(context)
        assignment = await self.finder.find(client, request.token)
        if assignment is None:
            return steps.refuse()
        return await self._half_of(assignment).take_step(client, assignment, request)

    def _half_of(self, assignment: Assignment) -> half.ServerHalf:
        """Return the half of the training of an assignment's job."""
        return self.halves.training_of(self.finder.job_of(assignment).spec)
