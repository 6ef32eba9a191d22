"""The service of `fleet.proto`: what clients say."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

from grpc import aio

from fedplat import durable, rounds, wire
from fedplat.aggregate import unusable
from fedplat.job import build_rule
from fedplat.rounds import Assignment, AttemptKey, JobState, ModelVersion, Verdict, influence
from fedplat.rounds.commands import Assign, Refuse, RetryWindow
from fedplat.rounds.events import (
    AggregationFailed,
    AssignmentFailed,
    ClientCheckedIn,
    UpdateRejected,
    UpdateReported,
    UploadStarted,
)
from fedplat.rounds.states import FAILURES, AssignmentState, AttemptKind, Reason
from fedplat.wire.v1 import fleet_pb2
from fedplat_server import __version__, intake
from fedplat_server.check_in import SOON, wait_for_work
from fedplat_server.errors import Code, RefusedError, SpoolError
from fedplat_server.rpc import convert, memory, reports, requests, streams
from fedplat_server.rpc.membership import MembershipService
from fedplat_server.runner import hash_secret
from fedplat_server.services import Services
from fedplat_server.store.clients import ClientRecord
from fedplat_server.uploads import UploadKey

Context: TypeAlias = "aio.ServicerContext[Any, Any]"  # a string: generic for the type checker only
DRAINING = RetryWindow(1.0, 5.0)


class FleetService(MembershipService):
    """Every method: who is it, what does the coordinator say, tell them."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        # Of clients with a report under way.
        self._reporting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def CheckIn(self, request: fleet_pb2.CheckInRequest, context: Context) -> fleet_pb2.CheckInResponse:
        """Waits for work."""
        requests.protocol_version(request.protocol_version)
        client = await self._client(context)
        labels = requests.labels(request.labels, self._limits)
        trainers = requests.names(request.trainers, "trainer", self._limits)
        evaluators = requests.names(request.evaluators, "evaluator", self._limits)
        version = requests.text(request.software_version, 100)
        client = await self._services.clients.update(client, labels, version)
        response = fleet_pb2.CheckInResponse(protocol_version=wire.PROTOCOL_VERSION, software_version=__version__)
        if reason := self._services.refuse_if_draining():
            response.refusal.CopyFrom(convert.refusal(reason, DRAINING))
            return response
        event = ClientCheckedIn(
            client_id=client.client_id,
            population=client.population,
            labels=labels,
            trainers=trainers,
            evaluators=evaluators,
            codecs=requests.names(request.codecs, "codec", self._limits),
        )
        wait_s = requests.wait_s(request.wait_s, self._limits)
        answer = await wait_for_work(self._services.runner, self._services.desk, event, wait_s)
        assignment = await self._assignment(answer) if isinstance(answer, Assign) else None
        await self._services.clients.find(client.client_id)  # it may have been revoked while it waited
        if assignment is not None:
            response.assignment.CopyFrom(assignment)
        elif reason := self._services.refuse_if_draining():
            response.refusal.CopyFrom(convert.refusal(reason, DRAINING))
        elif isinstance(answer, Refuse):
            response.refusal.CopyFrom(convert.refusal(answer.reason, answer.retry))
        return response

    # Messages of files are bytes here, and not what the generated code makes of them: see `serving`.
    async def Download(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: fleet_pb2.DownloadRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Sends a model of one of the population's jobs, or a delta, as messages `Chunk`."""
        client = await self._client(context)
        digest = requests.digest(request.digest)
        if not await self._may_read(client, digest):
            raise RefusedError(Code.NO_SUCH_MODEL, digest)
        with self._services.quotas.stream(client.client_id):
            async for message in streams.send(self._services.chunks, self._services.blobs.path(digest), request.offset):
                await self._services.clients.find(client.client_id)  # it may be revoked meanwhile
                yield message

    async def Upload(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request_iterator: AsyncIterator[streams.Part], context: Context
    ) -> fleet_pb2.UploadResponse:
        """Receives an update, from where it stopped."""
        messages = streams.steadily(request_iterator, self._limits)
        first = await anext(messages, None)  # before we know who calls: it is what was signed
        client = await self._client(context)
        if first is None or first.header is None:
            raise RefusedError(Code.INVALID_REQUEST, "an upload must begin with a header")
        with self._services.quotas.stream(client.client_id):
            return await self._receive(client, first.header, messages)

    async def _receive(
        self, client: ClientRecord, header: fleet_pb2.UploadHeader, messages: AsyncIterator[streams.Part]
    ) -> fleet_pb2.UploadResponse:
        key, _ = await self._open_assignment(client, header.token)
        await self._check_size(key, client.client_id, header.size_bytes)
        started = await self._services.runner.submit(UploadStarted(key, client.client_id))
        if not started.accepted:
            raise RefusedError(Code.STALE_ASSIGNMENT, started.text or started.reason or "")
        upload_key = UploadKey(*key, client.client_id)
        size_bytes = min(max(header.size_bytes - header.offset, 0), memory.UPLOAD_BYTES)

        def still_wanted() -> bool:
            found = self._services.runner.coordinator.find(key, client.client_id)
            return found is not None and found[1].is_busy

        async def parts() -> AsyncIterator[durable.Bytes]:
            async for part in messages:
                await self._count_bytes(key, client.client_id, len(part.data))
                yield part.data

        try:
            async with self._services.memory.uploads.share(size_bytes):
                received = await streams.receive(self._services.uploads, upload_key, header, parts(), still_wanted)
        finally:
            await self._tidy_up(key, upload_key)
        return fleet_pb2.UploadResponse(received_bytes=received)

    async def QueryUpload(
        self, request: fleet_pb2.QueryUploadRequest, context: Context
    ) -> fleet_pb2.QueryUploadResponse:
        """Tells where an upload resumes."""
        client = await self._client(context)
        key, _ = await self._open_assignment(client, request.token)
        upload_key, digest = UploadKey(*key, client.client_id), requests.digest(request.digest)
        received = await asyncio.to_thread(self._services.uploads.received, upload_key, digest)
        return fleet_pb2.QueryUploadResponse(received_bytes=received)

    async def Report(self, request: fleet_pb2.ReportRequest, context: Context) -> fleet_pb2.ReportResponse:
        """Commits an update."""
        client = await self._client(context)
        # One at a time: the same report that comes twice waits for the first, and has its receipt then.
        async with self._reporting.setdefault(client.client_id, asyncio.Lock()):
            return await self._report(client, request)

    async def _report(self, client: ClientRecord, request: fleet_pb2.ReportRequest) -> fleet_pb2.ReportResponse:
        found = await self._find(client, request.token)
        if found is None:
            return fleet_pb2.ReportResponse(refusal=convert.refusal(Reason.STALE, SOON))
        key, assignment = found
        if assignment.is_busy:
            verdict = await self._take_report(key, client, request)
        else:
            verdict = rounds.verdict_on_report(assignment, request.digest)
        if verdict.reason is Reason.REJECTED_CONFLICT:
            await self._services.conflicts.note(key, client.client_id, assignment.digest, request.digest)
        if verdict.accepted:
            receipt = fleet_pb2.Receipt(job_id=key.job_id, round=key.round, attempt=key.number, digest=request.digest)
            return fleet_pb2.ReportResponse(receipt=receipt)
        return fleet_pb2.ReportResponse(refusal=convert.refusal(verdict.reason or Reason.STALE, SOON, verdict.text))

    async def Fail(self, request: fleet_pb2.FailRequest, context: Context) -> fleet_pb2.FailResponse:
        """Gives an assignment up."""
        client = await self._client(context)
        reason = convert.reason_from_wire(request.reason)
        if reason is None or reason not in FAILURES:
            raise RefusedError(
                Code.INVALID_REQUEST, f"expected one of {', '.join(sorted(FAILURES))} as the reason of a failure"
            )
        found = await self._find(client, request.token)
        if found is not None and found[1].is_busy:
            text = requests.text(request.text, self._limits.max_text)
            await self._services.runner.submit(AssignmentFailed(found[0], client.client_id, reason, text))
        return fleet_pb2.FailResponse()

    async def Heartbeat(self, request: fleet_pb2.HeartbeatRequest, context: Context) -> fleet_pb2.HeartbeatResponse:
        """Take the progress in; answer "go on" with the time that is left after a while, or "stop" at once."""
        client = await self._client(context)
        progress = requests.progress(request.progress)
        found = await self._find(client, request.token)
        if found is None:
            return fleet_pb2.HeartbeatResponse(stop=convert.refusal(Reason.STALE, SOON))
        key, assignment = found
        if assignment.is_busy:
            self._services.progress.record(assignment, progress)
            wait_s = requests.wait_s(request.wait_s, self._limits)
            with self._services.desk.working(key, client.client_id) as stopped, contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), wait_s)
            await self._services.clients.find(client.client_id)
            found = await self._find(client, request.token)
        if found is not None and found[1].is_busy:
            remaining_s = max(found[1].deadline_at - self._services.runner.now, 0.0)
            uploading = found[1].state is AssignmentState.UPLOADING
            proceed = fleet_pb2.Continue(remaining_s=remaining_s, uploading=uploading)
            return fleet_pb2.HeartbeatResponse(proceed=proceed)
        reason = (found[1].reason if found is not None else None) or Reason.STALE
        return fleet_pb2.HeartbeatResponse(stop=convert.refusal(reason, SOON))

    async def _client(self, context: Context) -> ClientRecord:
        client = await self._known(context)
        self._services.quotas.request(client.client_id)
        end_call = self._services.clients.begin_call(client.client_id, self._limits.max_calls)

        def done(_: object) -> None:
            end_call()

        context.add_done_callback(cast(Any, done))
        return client

    async def _assignment(self, command: Assign) -> fleet_pb2.Assignment:
        job = self._services.jobs.state(command.key.job_id)
        spec, model = job.spec, await self._base_of(job, command.base_version)
        model_bytes = await self._services.inline_models.content(model)
        return fleet_pb2.Assignment(
            token=command.token,
            job_id=job.job_id,
            job_name=spec.name,
            round=command.key.round,
            attempt=command.key.number,
            task=convert.TASKS[command.kind],
            trainer=convert.handler_of(spec, command.kind),
            model=convert.model_ref(model),
            config={name: convert.value(scalar) for name, scalar in spec.config.items()},
            training_timeout_s=command.training_timeout_s,
            upload_timeout_s=command.upload_timeout_s,
            heartbeat_s=spec.deadlines.heartbeat_s,
            uplink=convert.uplink(spec, command.kind),
            model_bytes=model_bytes,
            delta=None if model_bytes else convert.model_delta(model, spec),
        )

    async def _base_of(self, job: JobState, version: int) -> ModelVersion:
        """The version that an assignment begins with; no longer the latest, if that is given out again late."""
        found = job.latest if job.latest.version == version else None
        found = found or await self._services.store.jobs.find_version(job.job_id, version)
        assert found is not None
        return found

    async def _may_read(self, client: ClientRecord, digest: str) -> bool:
        for job in self._services.runner.coordinator.jobs.values():
            latest = job.latest
            if digest in (latest.digest, latest.delta_digest) and job.spec.population == client.population:
                return True
        return client.population in await self._services.store.jobs.find_populations(digest)

    async def _find(self, client: ClientRecord, token: str) -> tuple[AttemptKey, Assignment] | None:
        """The assignment that the token names, however old; None when it is not this client's."""
        coordinator, token_hash = self._services.runner.coordinator, hash_secret(token)
        key = coordinator.assignment_of(client.client_id)
        live = coordinator.find(key, client.client_id) if key is not None else None
        if key is not None and live is not None and secrets.compare_digest(live[1].token_hash, token_hash):
            return key, live[1]
        stored = await self._services.store.jobs.find_assignment(token_hash)
        if stored is None or stored[1].client_id != client.client_id:
            return None
        live = coordinator.find(stored[0], client.client_id)
        return (stored[0], live[1]) if live is not None else stored

    async def _open_assignment(self, client: ClientRecord, token: str) -> tuple[AttemptKey, Assignment]:
        found = await self._find(client, token)
        if found is None:
            raise RefusedError(Code.STALE_ASSIGNMENT)
        if not found[1].is_busy:
            raise RefusedError(Code.STALE_ASSIGNMENT, found[1].reason or found[1].state)
        return found

    def _size_limit(self, key: AttemptKey) -> int:
        """The most bytes that an update of the job's open attempt may have."""
        job = self._services.jobs.state(key.job_id)
        return intake.size_limit(self._services.blobs.path(job.latest.digest), job.spec.compression.uplink)

    async def _check_size(self, key: AttemptKey, client_id: str, size_bytes: int) -> None:
        limit = self._size_limit(key)
        if size_bytes > limit:
            text = f"the update has {size_bytes} bytes; at most {limit} are accepted for this model"
            await self._reject(key, client_id, Reason.REJECTED_SCHEMA, text)
            raise RefusedError(Code.TOO_LARGE, text)

    async def _count_bytes(self, key: AttemptKey, client_id: str, num_bytes: int) -> None:
        """Bounds what a client sends for an attempt, whatever for. Beyond it the assignment is over."""
        try:
            self._services.quotas.upload(client_id, key, self._size_limit(key), num_bytes)
        except RefusedError as exc:
            await self._services.runner.submit(AssignmentFailed(key, client_id, Reason.TRANSFER_FAILED, str(exc)))
            raise

    async def _tidy_up(self, key: AttemptKey, upload_key: UploadKey) -> None:
        """Throws away what arrived while the assignment was ending, after all other uploads for it had been.

        What an attempt has taken in goes with that attempt: it may be being folded this very moment.
        """
        found = self._services.runner.coordinator.find(key, upload_key.client_id)
        if found is None or not (found[1].is_open or found[1].buffer is not None):
            await asyncio.to_thread(self._services.uploads.discard, upload_key)

    async def _take_report(self, key: AttemptKey, client: ClientRecord, request: fleet_pb2.ReportRequest) -> Verdict:
        """Checks a report and hands it to the coordinator."""
        services, client_id = self._services, client.client_id
        if bad := influence.why_examples_are_bad(request.num_examples):
            return await self._reject(key, client_id, Reason.REJECTED_WEIGHT, bad)
        if bad := requests.why_metrics_are_bad(request.metrics, self._limits):
            return await self._reject(key, client_id, Reason.REJECTED_METRICS, bad)
        found, update_bytes, norm = services.runner.coordinator.find(key, client_id), 0, None
        if found is not None and found[0] is AttemptKind.TRAIN:
            if lacking := unusable(build_rule(services.jobs.state(key.job_id).spec), request.metrics):
                return await self._reject(key, client_id, Reason.REJECTED_METRICS, lacking)
            taken = await self._take_in(key, client_id, request)
            if not isinstance(taken, reports.TakenIn):
                return await self._reject(key, client_id, *taken)
            update_bytes, norm = taken
        elif request.digest:
            return await self._reject(key, client_id, Reason.REJECTED_DIGEST, "an evaluation has no update")
        metrics, digest = dict(request.metrics), request.digest
        reported = UpdateReported(key, client_id, digest, request.num_examples, metrics, update_bytes, norm)
        verdict = await services.runner.submit(reported)
        if not verdict.accepted:
            await self._tidy_up(key, UploadKey(*key, client_id))
        return verdict

    async def _take_in(
        self, key: AttemptKey, client_id: str, request: fleet_pb2.ReportRequest
    ) -> reports.TakenIn | tuple[Reason, str]:
        """What is known of the update that a report brings or names, which outlives this process; or why it is no good.

        Raises `RefusedError`.
        """
        services, digest, upload_key = self._services, requests.digest(request.digest), UploadKey(*key, client_id)
        if request.update:
            await self._count_bytes(key, client_id, len(request.update))
        job = services.jobs.state(key.job_id)
        base, codec = services.blobs.path(job.latest.digest), job.spec.compression.uplink
        check = functools.partial(intake.check_update, base=base, codec=codec)
        try:
            return await asyncio.to_thread(reports.take_in, services.uploads, upload_key, digest, request.update, check)
        except SpoolError as exc:
            await self._spool_failed(key, client_id, f"the spool cannot be trusted: {exc}")
            raise RefusedError(Code.UPLOAD_INCOMPLETE, "the server's disk failed; the assignment is over") from exc
        finally:
            await self._tidy_up(key, upload_key)

    async def _spool_failed(self, key: AttemptKey, client_id: str, text: str) -> None:
        """Abandons the open attempt whose folder failed; in the folder of an earlier one, others were synced before."""
        attempt = self._services.jobs.state(key.job_id).open_attempt
        if attempt is not None and attempt.key == key:
            self._services.runner.post(AggregationFailed(key, text))
        else:
            await self._services.runner.submit(AssignmentFailed(key, client_id, Reason.TRANSFER_FAILED, text))

    async def _reject(self, key: AttemptKey, client_id: str, reason: Reason, text: str) -> Verdict:
        text = requests.text(text, self._limits.max_text)  # it may quote what the client sent
        verdict = await self._services.runner.submit(UpdateRejected(key, client_id, reason, text))
        return Verdict(reason, text) if verdict.accepted else verdict
