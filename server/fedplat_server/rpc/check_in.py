"""The handler of the Fleet service with which a client waits for work, and the models that it gets."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
from collections.abc import AsyncGenerator, Callable

from typing_extensions import override

from fedplat import rounds, wire
from fedplat.rounds import AssignmentId, JobState, ModelVersion, commands, events, states
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.protocols.base import protocol_of
from fedplat.wire import digests
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server import __version__, config, errors, logs
from fedplat_server.auth.client_directory import Offer
from fedplat_server.coordination.long_polls import LongPolls, Presence, wait_for_work
from fedplat_server.coordination.progress import Downloads
from fedplat_server.coordination.runner import Runner
from fedplat_server.database import records, sql_jobs
from fedplat_server.database.records import ClientRecord
from fedplat_server.instruments import Instruments
from fedplat_server.messages import convert, streams, validation
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.rpc import client_access, interceptor
from fedplat_server.rpc.client_access import ClientAccess
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.read_cache import Chunks, InlineModels
from fedplat_server.tracing import ids

DRAINING = commands.RetryWindow(1.0, 5.0)
NEXT_WAIT_S = 2.0
"""The longest time for which an accepted report waits for the next assignment of its client."""


class AssignmentMessages:
    """Makes the messages of new assignments."""

    def __init__(
        self, runner: Runner, halves: ServerHalves, models: ClientModels, *, is_tracing: bool, max_downloads: int
    ) -> None:
        self._coordinator = runner.coordinator
        self._halves = halves
        self._models = models
        self._is_tracing = is_tracing
        self._max_downloads = max_downloads

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
            job_digest=job.digest,
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
            digest_last=True,
            # Clients that mask have to help to unmask the sum after their reports, which are answered at once.
            check_in_with_report=not protocol_of(job, command.kind).has_masks,
            blake3=digests.has_blake3(),
            num_rounds=spec.rounds,
            max_downloads=self._max_downloads,
        )
        if not model_bytes:
            message.model.blake3 = self._models.blobs.find_blake3(model.digest)
        message.MergeFrom(self._halves.of(job, command.kind).make_task(spec))
        message.MergeFrom(await self._halves.training_of(job.spec).set_up(job, command.key))
        return message


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class CheckIns:
    """The check-ins of free clients, each in a call of its own or with the report that made the client free."""

    access: client_access.ClientAccess
    limits: config.Limits
    presence: Presence
    runner: Runner
    long_polls: LongPolls
    messages: AssignmentMessages
    instruments: Instruments
    draining: asyncio.Event
    """It is set when the daemon stops: clients get no more assignments."""

    async def next_assignment(
        self, client: ClientRecord, request: fleet_pb2.CheckInRequest
    ) -> fleet_pb2.Assignment | None:
        """Wait for up to `NEXT_WAIT_S` for the assignment of a client whose report was accepted; None without one.

        The report is answered in any case: an invalid check-in is refused when it comes again in its own call.
        """
        try:
            response = await self.wait(client, request, NEXT_WAIT_S)
        except (errors.RefusedError, errors.StoreError) as exc:
            logs.get().debug("a report is answered without the next assignment", error=str(exc))
            return None
        return response.assignment if response.HasField("assignment") else None

    async def wait(
        self, client: ClientRecord, request: fleet_pb2.CheckInRequest, longest_s: float = math.inf
    ) -> fleet_pb2.CheckInResponse:
        """Wait for the assignment of a free client, at most as long as it asks for. Raises `RefusedError`."""
        labels = validation.labels(request.labels, self.limits)
        trainers = validation.names(request.trainers, "trainer", self.limits)
        evaluators = validation.names(request.evaluators, "evaluator", self.limits)
        version = validation.text(request.software_version, 100)
        approvals = validation.approvals(request)
        client = await self.presence.note(client, labels, version, Offer(trainers, evaluators), request.approvals)
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
            approvals=approvals,
        )
        wait_s = min(validation.wait_s(request.wait_s, self.limits), longest_s)
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


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class CheckInService(fleet_pb2_grpc.FleetServicer):
    """The method with which a free client waits for an assignment."""

    access: client_access.ClientAccess
    check_ins: CheckIns

    @override
    async def CheckIn(
        self, request: fleet_pb2.CheckInRequest, context: interceptor.Context
    ) -> fleet_pb2.CheckInResponse:
        validation.protocol_version(request.protocol_version)
        client = await self.access.begin_call(context)
        return await self.check_ins.wait(client, request)


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ClientModels:
    """Sends models to clients, counts their bytes, and records which clients have the model of their assignment."""

    access: ClientAccess
    runner: Runner
    store: sql_jobs.JobStore
    blobs: BlobStore
    chunks: Chunks
    inline_models: InlineModels
    downloads: Downloads
    instruments: Instruments

    async def find_base(self, job: JobState, version: int) -> ModelVersion:
        """Return the version that an assignment starts from; not the latest if a late client reclaims it."""
        base = job.latest if job.latest.version == version else None
        base = base or await self.store.find_version(job.job_id, version)
        assert base is not None
        return base

    async def include(self, job: JobState, model: ModelVersion, assignment: AssignmentId) -> bytes:
        """Return the model for the message of an assignment; empty if it is too large for that."""
        content = await self.inline_models.content(model)
        if content:
            self.downloads.record(assignment)
            self._count_bytes(job, "inline", len(content))
        return content

    async def require_access(self, client: records.ClientRecord, digest: str) -> None:
        """Raise `RefusedError` for a file that is not for this client."""
        for job in self.runner.coordinator.jobs.values():
            latest = job.latest
            if digest in (latest.digest, latest.delta_digest) and job.spec.population == client.population:
                return
        if client.population not in await self.store.find_populations(digest):
            raise errors.RefusedError(errors.Code.NO_SUCH_MODEL, digest)

    async def send(self, client: records.ClientRecord, digest: str, offset: int, length: int) -> AsyncGenerator[bytes]:
        """Yield the messages of a file from an offset on, see `streams.send`. Raises `RefusedError`."""
        count_bytes = self._bytes_counter(client, digest)
        found = streams.send(self.chunks, self.blobs, digest, offset, length)
        async with contextlib.aclosing(found) as messages:
            async for message in messages:
                await self.access.require(client)
                count_bytes(len(message))
                yield message

    async def note_download(self, client: records.ClientRecord, digest: str) -> None:
        """Record that a client has received a file to its end, if that is its assignment's model or the step to it."""
        coordinator = self.runner.coordinator
        key = coordinator.assignment_of(client.client_id)
        assignment = coordinator.find(key, client.client_id) if key is not None else None
        if key is None or assignment is None:
            return
        base = await self.find_base(coordinator.jobs[key.job_id], assignment.base_version)
        if digest in (base.digest, base.delta_digest):
            self.downloads.record(assignment.id)

    def _bytes_counter(self, client: records.ClientRecord, digest: str) -> Callable[[int], None]:
        """Return a function that counts bytes of a file as sent to a client, for the job that it works for."""
        coordinator = self.runner.coordinator
        key = coordinator.assignment_of(client.client_id)
        job = coordinator.jobs.get(key.job_id) if key is not None else None
        form = "delta" if job is not None and digest == job.latest.delta_digest else "file"
        return functools.partial(self._count_bytes, job, form)

    def _count_bytes(self, job: JobState | None, form: str, num_bytes: int) -> None:
        instruments = self.instruments
        if job is None or disclosure_of(job.spec).shows_cohorts:
            labels = instruments.jobs.of(job.job_id if job is not None else "")
            instruments.model_bytes.labels(*labels, form).inc(num_bytes)
