"""The handler of the Fleet service with which a client waits for work, and the messages of new assignments."""

from __future__ import annotations

import asyncio
import dataclasses

from typing_extensions import override

from fedplat import rounds, wire
from fedplat.rounds import commands, events, states
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server import __version__, logs
from fedplat_server.auth.client_directory import Offer
from fedplat_server.config import Limits
from fedplat_server.coordination.long_polls import LongPolls, Presence, wait_for_work
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.clients import ClientRecord
from fedplat_server.instruments import Instruments
from fedplat_server.messages import convert, validation
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.rpc import client_access, handlers
from fedplat_server.rpc.client_models import ClientModels
from fedplat_server.tracing import ids

DRAINING = commands.RetryWindow(1.0, 5.0)


class AssignmentMessages:
    """Makes the messages of new assignments."""

    def __init__(self, runner: Runner, halves: ServerHalves, models: ClientModels, *, is_tracing: bool) -> None:
        self._coordinator = runner.coordinator
        self._halves = halves
        self._models = models
        self._is_tracing = is_tracing

    async def make(self, command: commands.Assign) -> fleet_pb2.Assignment:
        """Return the message of an assignment, with the model if it is small."""
        assignment = rounds.AssignmentId(command.key, command.client_id)
        logs.bind(**logs.assignment_fields(assignment))
        job = self._coordinator.jobs[command.key.job_id]
        spec, model = job.spec, await self._models.find_base(job, command.base_version)
        model_bytes = await self._models.include(job, model, assignment)
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
            traceparent=ids.traceparent(assignment, spec.num_wanted) if self._is_tracing else "",
        )
        message.MergeFrom(self._halves.of(job, command.kind).make_task(spec))
        message.MergeFrom(await self._halves.training_of(job.spec).set_up(job, command.key))
        return message


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class CheckInService(fleet_pb2_grpc.FleetServicer):
    """The method with which a free client waits for an assignment."""

    access: client_access.ClientAccess
    limits: Limits
    presence: Presence
    runner: Runner
    long_polls: LongPolls
    messages: AssignmentMessages
    instruments: Instruments
    draining: asyncio.Event
    """It is set when the daemon stops: clients get no more assignments."""

    @override
    async def CheckIn(self, request: fleet_pb2.CheckInRequest, context: handlers.Context) -> fleet_pb2.CheckInResponse:
        validation.protocol_version(request.protocol_version)
        client = await self.access.begin_call(context)
        labels = validation.labels(request.labels, self.limits)
        trainers = validation.names(request.trainers, "trainer", self.limits)
        evaluators = validation.names(request.evaluators, "evaluator", self.limits)
        version = validation.text(request.software_version, 100)
        client = await self.presence.note(client, labels, version, Offer(trainers, evaluators))
        response = fleet_pb2.CheckInResponse(protocol_version=wire.PROTOCOL_VERSION, software_version=__version__)
        if reason := self._refuse_if_draining():
            response.refusal.CopyFrom(convert.refusal(reason, DRAINING))
            self._count_check_in(client, reason)
            return response
        event = events.ClientCheckedIn(
            client_id=client.client_id,
            population=client.population,
            labels=labels,
            trainers=trainers,
            evaluators=evaluators,
            codecs=validation.names(request.codecs, "codec", self.limits),
            algorithms=validation.names(request.algorithms, "algorithm", self.limits),
            features=validation.names(request.features, "feature", self.limits),
            session=client.session_number,
        )
        wait_s = validation.wait_s(request.wait_s, self.limits)
        command = await wait_for_work(self.runner, self.long_polls, event, wait_s)
        assignment = await self.messages.make(command) if isinstance(command, commands.Assign) else None
        await self.access.require(client)  # it may have been revoked while it waited
        reason = None
        if assignment is not None:
            response.assignment.CopyFrom(assignment)
        elif reason := self._refuse_if_draining():
            response.refusal.CopyFrom(convert.refusal(reason, DRAINING))
        elif isinstance(command, commands.Refuse):
            reason = command.reason
            response.refusal.CopyFrom(convert.refusal(reason, command.retry))
        self._count_check_in(client, reason)
        return response

    def _refuse_if_draining(self) -> states.Reason | None:
        return states.Reason.DRAINING if self.draining.is_set() else None

    def _count_check_in(self, client: ClientRecord, reason: states.Reason | None) -> None:
        instruments = self.instruments
        if instruments.populations.is_hidden(client.population):
            return
        result = "assigned" if reason is None else reason.value.lower()
        instruments.check_ins.labels(instruments.populations.of(client.population), result).inc()
