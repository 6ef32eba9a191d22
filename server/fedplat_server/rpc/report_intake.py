"""Intake of uploads and reports: receives updates within limits, validates them, makes them durable, accepts them.

`fedplat.report_validation` has the rules; the coordinator makes the decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import NamedTuple
from weakref import WeakValueDictionary

from fedplat.aggregate import Rule
from fedplat.errors import PluginError, UserCodeError
from fedplat.job import JobSpec, build_rule
from fedplat.rounds import Assignment, AssignmentId, JobState, Verdict, events, states
from fedplat.rounds.protocols.base import protocol_of
from fedplat.wire.v1 import fleet_pb2
from fedplat_server import config, errors, logs
from fedplat_server.auth.rate_limits import Quotas
from fedplat_server.coordination.runner import Runner, finish
from fedplat_server.database.sql_contents import MAX_BYTES, NO_CONTENTS, SmallContents
from fedplat_server.messages import streams, validation
from fedplat_server.messages.ordered_writer import OrderedWriter
from fedplat_server.messages.streams import UploadMemory
from fedplat_server.protocols.half import ServerHalf, Validate, ValidateSmall
from fedplat_server.protocols.registry import ServerHalves
from fedplat_server.rpc.client_access import AssignmentFinder
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.spool import Spool

QUICK_UPLOAD_S = 1.0
"""The time after which the upload of an update of middle size is noted as such."""
MUCH_TIME_S = 30.0
"""The least time to the deadline of an assignment whose upload is not noted at once."""
MAX_RULES = 256
"""Jobs whose rules are kept in memory."""


class ReceivedUpdate(NamedTuple):
    """An update that is complete and valid, and durable unless it has a `content` that must become a row, or is open.

    `is_open`: its record must be stored.
    """

    size_bytes: int
    norm: float | None
    content: bytes | None = None
    is_open: bool = False


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class ReportIntake:
    """Receives the uploads and reports of clients for their open assignments."""

    limits: config.Limits
    runner: Runner
    finder: AssignmentFinder
    halves: ServerHalves
    memory: UploadMemory
    spool: Spool
    blobs: BlobStore
    quotas: Quotas

    def __post_init__(self) -> None:
        self._rules: OrderedDict[str, tuple[JobSpec, Rule]] = OrderedDict()  # by job
        self._receiving: WeakValueDictionary[AssignmentId, asyncio.Lock] = WeakValueDictionary()
        self._writers: WeakValueDictionary[tuple[AssignmentId, str], OrderedWriter] = WeakValueDictionary()

    async def receive_upload(
        self, assignment: Assignment, header: fleet_pb2.UploadHeader, messages: AsyncIterator[streams.UploadMessage]
    ) -> int:
        """Receive an upload from the header's offset, or parts of one that another call has begun.

        Returns the number of bytes stored so far. Raises `RefusedError`.
        """
        job, half = self.finder.job_of(assignment), self._half_of(assignment)
        refusal = half.judge(job, assignment)
        if not refusal.accepted:
            await self._reject(assignment, refusal)
            raise errors.RefusedError(errors.Code.STALE_ASSIGNMENT, refusal.text)
        limit = await self._check_size(assignment, header.size_bytes)
        is_busy = functools.partial(self._is_busy, assignment)

        async def contents() -> AsyncIterator[streams.UploadMessage]:
            async for part in messages:
                await self._count_bytes(assignment, limit, len(part.data))
                yield part

        name = assignment.id, validation.upload_name(header)
        if header.additional:
            writer = self.find_writer(name)
            async with self.memory.uploads.share(streams.UPLOAD_BYTES):
                return await streams.receive(writer, header.size_bytes, contents(), is_busy)
        norm = await half.running_norm(job, assignment)
        size_bytes = min(max(header.size_bytes - header.offset, 0), streams.UPLOAD_BYTES)
        size_bytes += norm.memory_bytes if norm is not None else 0
        async with self._note_upload(assignment, header.size_bytes), self.memory.uploads.share(size_bytes):
            open_upload = functools.partial(self.spool.open, assignment.id, norm=norm)
            writer = await streams.open_writer(open_upload, header, is_busy, self.limits.idle_s)
            self._writers[name] = writer
            return await streams.receive(writer, header.size_bytes, contents(), is_busy)

    def count_calls(self) -> int:
        """Return how many calls may bring an upload at a time: one, if uploads already hold half of the memory.

        If the line breaks, it takes a while until the server notices. One stream is left to resume meanwhile.
        """
        return max(self.limits.max_streams - 1, 1) if self.memory.uploads.is_half_free else 1

    def find_writer(self, name: tuple[AssignmentId, str]) -> OrderedWriter:
        """Return the writer of an upload for one more call. Raises `RefusedError`."""
        if self.count_calls() == 1:
            raise errors.RefusedError(errors.Code.TOO_MANY_UPLOADS)
        writer = self._writers.get(name)
        if writer is None:
            raise errors.RefusedError(errors.Code.WRONG_OFFSET, "no open call has begun this upload")
        return writer

    @contextlib.asynccontextmanager
    async def _note_upload(self, assignment: Assignment, size_bytes: int) -> AsyncGenerator[None]:
        """Let the state of an assignment be UPLOADING, which gives its client more time.

        That is a transaction. For an update of middle size, whose client has much time left, it is only made if the
        upload takes long. Raises `RefusedError` if the assignment has ended.
        """
        event = events.UploadStarted(*assignment.id)
        has_time, segments = assignment.deadline_at - self.runner.now > MUCH_TIME_S, self.spool.segments
        is_record = segments is not None and segments.stores_record(assignment.id, size_bytes)
        if has_time and is_record and self._is_busy(assignment):
            timer = asyncio.get_running_loop().call_later(QUICK_UPLOAD_S, self.runner.post, event)
            try:
                yield
            finally:
                timer.cancel()
        else:
            started = await self.runner.submit(event)
            if not started.accepted:
                raise errors.RefusedError(errors.Code.STALE_ASSIGNMENT, started.text or started.reason or "")
            yield

    async def count_received(self, assignment: Assignment, name: str) -> int:
        """Return the number of bytes of an upload that were received, where it resumes; see `Spool.open`."""
        return await asyncio.to_thread(self.spool.count_received, assignment.id, name)

    async def submit_report(self, assignment: Assignment, request: fleet_pb2.ReportRequest) -> Verdict:
        """Validate a report and submit it to the coordinator. Raises `RefusedError` if it must be sent again."""
        update_bytes, norm, content = 0, None, None
        job, half = self.finder.job_of(assignment), self._half_of(assignment)
        verdict = half.judge(job, assignment)
        try:
            rule = self._rule_of(job)
        except (PluginError, UserCodeError) as exc:  # of a plugin, which may fail at any call
            logs.get().error(
                "an attempt has no aggregation rule", **logs.assignment_fields(assignment.id), error=str(exc)
            )
            await self._abandon(assignment, str(exc))
            return Verdict(states.Reason.ATTEMPT_ABANDONED)
        if verdict.accepted:
            verdict = half.judge_claims(rule, assignment, request)
        if not verdict.accepted:
            return await self._reject(assignment, verdict)
        if protocol_of(job, assignment.kind).folds:
            received = await self._receive_update(assignment, request)
            if isinstance(received, Verdict):
                return await self._reject(assignment, received)
            if received is not None:
                update_bytes, norm, content, _ = received
        reported = events.UpdateReported(
            *assignment.id, request.digest, request.num_examples, dict(request.metrics), update_bytes, norm
        )
        contents = SmallContents({assignment.id: content}) if content is not None else NO_CONTENTS
        return await self.runner.submit(reported, contents=contents)

    def _rule_of(self, job: JobState) -> Rule:
        """Return the rule of a job, which is built for its first report and again when its specification changes.

        It judges the metrics of reports only; each attempt builds its own. Raises as `build_rule`.
        """
        found = self._rules.get(job.job_id)
        if found is None or found[0] is not job.spec:
            found = self._rules[job.job_id] = job.spec, build_rule(job.spec)
            if len(self._rules) > MAX_RULES:
                self._rules.popitem(last=False)
        return found[1]

    async def _receive_update(
        self, assignment: Assignment, request: fleet_pb2.ReportRequest
    ) -> ReceivedUpdate | Verdict | None:
        """Return the update that a report contains or refers to, once it is durable; or its refusal.

        None if the assignment has ended since and the update was deleted: the coordinator then returns the verdict.
        """
        validation.update_digest(request.digest)
        if request.upload_id:
            validation.upload_id(request.upload_id)
        if request.update:
            await self._count_bytes(assignment, await self._size_limit(assignment), len(request.update))
        job = self.finder.job_of(assignment)
        # One report of an assignment after the other: the first may free the memory that the next would read.
        lock = self._receiving.setdefault(assignment.id, asyncio.Lock())
        try:
            async with lock, self.blobs.local(job.latest.digest) as (base,):
                half = self._half_of(assignment)
                is_small = len(request.update) == job.latest.size_bytes <= MAX_BYTES
                if is_small and (validate_small := half.small_validator(job, base)) is not None:
                    received = receive_small(self.spool, assignment.id, request, validate_small)
                    if received is not None:
                        return received
                validate = await half.validator(job, assignment, base)
                return await finish(self._make_durable(assignment.id, request, validate), _note_refused)
        except asyncio.CancelledError:  # the caller is gone; its next process may send another update
            self.spool.unseal(assignment.id, request.digest)
            raise
        except (errors.BlobFullError, errors.BlobUnavailableError):
            # It is sent again because of the server: an outage must not exhaust the client's quota.
            self.quotas.refund(assignment.client_id, assignment.key, len(request.update))
            raise
        except errors.SpoolError as exc:
            await self._abandon(assignment, f"the spool cannot be trusted: {exc}")
            raise errors.RefusedError(
                errors.Code.UPLOAD_INCOMPLETE, "the server's disk failed; the assignment is over"
            ) from exc
        except errors.RefusedError:
            if self._is_busy(assignment):
                raise
            return None

    async def _make_durable(
        self, key: AssignmentId, request: fleet_pb2.ReportRequest, validate: Validate
    ) -> ReceivedUpdate | Verdict:
        # One thread call for all steps: for a small update, switching threads costs more than the work.
        received = await self.spool.run_in_thread(key, receive_update, self.spool, key, request, validate)
        if isinstance(received, ReceivedUpdate) and received.is_open:
            try:
                with _translate_errors(key):
                    await self.spool.store(key, request.digest)
            except BaseException:
                self.spool.unseal(key, request.digest)
                raise
        return received

    def _is_busy(self, assignment: Assignment) -> bool:
        """Return whether the client of an assignment is still working on it."""
        current = self.runner.coordinator.find(*assignment.id)
        return current is not None and current.is_busy

    def _half_of(self, assignment: Assignment) -> ServerHalf:
        job = self.finder.job_of(assignment)
        return self.halves.of(job, assignment.kind)

    async def _size_limit(self, assignment: Assignment) -> int:
        job = self.finder.job_of(assignment)
        try:
            return await self._half_of(assignment).size_limit(job, assignment)
        except (PluginError, UserCodeError) as exc:  # of a plugin, which may fail at any call
            verdict = await self._reject(assignment, Verdict(states.Reason.REJECTED_SCHEMA, str(exc)))
            raise errors.RefusedError(errors.Code.STALE_ASSIGNMENT, verdict.text) from exc

    async def _check_size(self, assignment: Assignment, size_bytes: int) -> int:
        """Refuse a size above the limit, which is returned."""
        limit = await self._size_limit(assignment)
        if size_bytes > limit:
            text = f"the update has {size_bytes} bytes; at most {limit} are accepted for this model"
            await self._reject(assignment, Verdict(states.Reason.REJECTED_SCHEMA, text))
            raise errors.RefusedError(errors.Code.TOO_LARGE, text)
        return limit

    async def _count_bytes(self, assignment: Assignment, limit: int, num_bytes: int) -> None:
        """Count the bytes that a client sends for an attempt, including repetitions; beyond the quota, end it."""
        try:
            self.quotas.upload(assignment.client_id, assignment.key, limit, num_bytes)
        except errors.RefusedError as exc:
            await self._fail(assignment, str(exc))
            raise

    async def _abandon(self, assignment: Assignment, text: str) -> None:
        """Abandon the open attempt if its folder failed; for an earlier attempt, only fail the assignment.

        The other updates of an earlier attempt were synced before.
        """
        attempt = self.finder.job_of(assignment).open_attempt
        if attempt is not None and attempt.key == assignment.key:
            self.runner.post(events.AggregationFailed(assignment.key, text))
        else:
            await self._fail(assignment, text)

    async def _fail(self, assignment: Assignment, text: str) -> None:
        await self.runner.submit(events.AssignmentFailed(*assignment.id, states.Reason.TRANSFER_FAILED, text))

    async def _reject(self, assignment: Assignment, refusal: Verdict) -> Verdict:
        """End the assignment; return the refusal, or the coordinator's verdict if the assignment has ended since."""
        assert refusal.reason is not None
        text = validation.text(refusal.text, self.limits.max_text)  # it may quote the client's input
        verdict = await self.runner.submit(events.UpdateRejected(*assignment.id, refusal.reason, text))
        return Verdict(refusal.reason, text) if verdict.accepted else verdict


def _note_refused(exc: BaseException) -> None:
    logs.get().info("an update without a caller was refused", error=str(exc))


def receive_small(
    spool: Spool, key: AssignmentId, report: fleet_pb2.ReportRequest, validate: ValidateSmall
) -> ReceivedUpdate | Verdict | None:
    """Return what `receive_update` does, without waiting for anything; None if the update needs a thread.

    Raises `RefusedError` if the assignment has ended.
    """
    digest, update = report.digest, report.update
    if report.upload_id:
        return None
    if not _has_digest(update, digest):
        return Verdict(states.Reason.REJECTED_DIGEST)
    try:
        if not spool.hold_row(key, digest, update, at_once=True):
            return None
    except errors.UploadError as exc:
        raise errors.RefusedError(errors.Code.UPLOAD_INCOMPLETE, str(exc)) from exc
    norm = validate(update)
    if isinstance(norm, Verdict):
        spool.unseal(key, digest)
        return norm
    return ReceivedUpdate(len(update), norm, update)


def receive_update(
    spool: Spool, key: AssignmentId, report: fleet_pb2.ReportRequest, validate: Validate
) -> ReceivedUpdate | Verdict:
    """Validate the update of a report and make it durable; return its size and norm, or its refusal. Blocks.

    The digest and the `upload_id` of the report are valid. Raises `RefusedError` if the update is missing or could not
    be stored, `BlobFullError` if the disk or the store is full, `BlobUnavailableError` if the store does not answer,
    `SpoolError` if the attempt cannot continue.
    """
    digest, update = report.digest, report.update
    if update:
        if not _has_digest(update, digest):
            return Verdict(states.Reason.REJECTED_DIGEST)
        try:
            _write(spool, key, digest, update)
        except errors.UploadError as exc:  # a duplicate report, or a broken upload, is still writing
            raise errors.RefusedError(errors.Code.UPLOAD_INCOMPLETE, f"{exc}; report again") from exc
    part = spool.locate(key, digest, report.upload_id)
    if part is None:
        text = "call QueryUpload for the offset to resume from"
        if report.upload_id:
            text += (
                "; the bytes received may have another digest than the report, if the update changed while it was sent"
            )
        raise errors.RefusedError(errors.Code.UPLOAD_INCOMPLETE, text)
    try:
        try:
            norm = validate(part, spool.find_norm(key, digest))
        except FileNotFoundError as exc:  # just deleted, because the assignment has ended
            raise errors.RefusedError(errors.Code.UPLOAD_INCOMPLETE, "the assignment has ended") from exc
        return norm if isinstance(norm, Verdict) else _persist(spool, key, digest, norm)
    except BaseException:
        spool.unseal(key, digest)  # a restarted client trains again, and sends another update
        raise


def _has_digest(update: bytes, digest: str) -> bool:
    return hashlib.sha256(update).hexdigest() == digest


def _persist(spool: Spool, key: AssignmentId, digest: str, norm: float | None) -> ReceivedUpdate:
    """Make a valid update durable, unless the database or a segment does that."""
    if (content := spool.find_row(key, digest)) is not None:  # also if an earlier report of it was not stored
        return ReceivedUpdate(len(content), norm, content)
    if (record := spool.find_open(key, digest)) is not None:
        return ReceivedUpdate(record.received, norm, is_open=True)
    with _translate_errors(key):
        return ReceivedUpdate(spool.persist(key, digest), norm)


@contextlib.contextmanager
def _translate_errors(key: AssignmentId) -> Generator[None]:
    """Translate the errors of an update that is not durable to those of its report."""
    try:
        yield
    except errors.UploadError as exc:
        raise errors.RefusedError(errors.Code.UPLOAD_INCOMPLETE, str(exc)) from exc
    except (errors.BlobFullError, errors.BlobUnavailableError, errors.SpoolError):
        raise
    except errors.BlobError as exc:
        logs.get().error("an update could not be made durable", **logs.assignment_fields(key), error=str(exc))
        raise errors.RefusedError(
            errors.Code.UPLOAD_INCOMPLETE, "the server could not store it; send it again"
        ) from exc


def _write(spool: Spool, key: AssignmentId, digest: str, update: bytes) -> None:
    if spool.locate(key, digest) is None and not spool.hold_row(key, digest, update):
        received = spool.count_received(key, digest)  # an interrupted upload may have stored the first bytes
        upload = spool.open(key, digest, len(update), received)
        try:
            if received < len(update):
                upload.write(update[received:])
            upload.finish()  # drops other bytes, such as a power failure leaves in a file that was not synced
        finally:
            upload.close()
