"""The handlers of the Fleet service for clients that work: their heartbeats, and that they have failed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from typing_extensions import override

from fedplat.rounds import events, states
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server.config import Limits
from fedplat_server.coordination.long_polls import RETRY_SOON, LongPolls
from fedplat_server.coordination.progress import Downloads, ProgressTracker
from fedplat_server.coordination.runner import Runner
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, validation
from fedplat_server.protocols.silence import MISSED_HEARTBEATS
from fedplat_server.rpc.client_access import AssignmentFinder, ClientAccess
from fedplat_server.rpc.handlers import Context


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
            self.progress.record_overdue(client.client_id, job_id, now + MISSED_HEARTBEATS * heartbeat_s)
        reason = (assignment.reason if assignment is not None else None) or states.Reason.STALE
        return fleet_pb2.HeartbeatResponse(stop=convert.refusal(reason, RETRY_SOON))
