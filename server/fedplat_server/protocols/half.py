"""What a server does differently for one kind of job or attempt, and the steps of clients within assignments.

A step is one call: the client sends a message, if it has one, and waits for its input, which is what it needs for what
it does next. Both depend on the kind of the job (`StepsHalf`). The input follows from the stored state, so a client
repeats a call until it is answered, and a restarted server answers as before. No message is logged.

Only the client of an assignment may take its steps. A step is refused

- by a status (`RefusedError`) if the job has no such steps, if its message is too large, out of order or not one that
  an honest client sends, or if the client has sent too many bytes in the attempt;
- by a refusal in the response if the assignment has ended, or ends by this message.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

from typing_extensions import override

from fedplat import aggregate, report_validation
from fedplat.codecs import container
from fedplat.job import JobSpec
from fedplat.model.file import FilePart
from fedplat.model.running_norm import RunningNorm
from fedplat.rounds import Assignment, AttemptKey, Change, JobState, Verdict, commands, privacy_rules, states
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_server.aggregation import backend
from fedplat_server.auth import client_directory, rate_limits
from fedplat_server.config import Limits
from fedplat_server.coordination.long_polls import RETRY_SOON, LongPolls
from fedplat_server.coordination.runner import Runner
from fedplat_server.database import records, sql_jobs
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages import convert, streams, validation
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.training.server_training import ServerTraining
from fedplat_server.workers.client import WorkerPool
from fedplat_server.workers.task_inputs import AttemptInputs

Validate = Callable[[FilePart, RunningNorm | None], float | Verdict | None]
"""A function that returns the norm of the update in a file, or its refusal. None: it is masked, and has no norm.

It also gets what has measured the file while it arrived, if anything has (`ServerHalf.running_norm`)."""
ValidateSmall = Callable[[bytes], float | Verdict]
"""A function that returns the norm of a small update in memory, or its refusal. No thread is needed for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfParts:
    """The parts that the halves of all kinds use."""

    limits: Limits
    blobs: BlobStore
    training: ServerTraining
    pool: WorkerPool


class ServerHalf:
    """The server's half of one kind, as long as the daemon leads. Comments name the callers."""

    def __init__(self, parts: HalfParts) -> None:
        self._parts = parts

    async def check_job(self, spec: JobSpec) -> None:
        """Raise `RefusedError` for a new job that this server cannot run. Asked by `jobs`."""

    # --- its assignments: fleet ---

    def make_task(self, spec: JobSpec) -> fleet_pb2.Assignment:
        """Return the fields of an assignment that name what its client runs. Asked for the kind of the assignment."""
        codec = spec.compression.uplink
        uplink = container.options_to_text(codec) if codec is not None else ""
        leaves_out = bool(spec.turn(1).groups)
        return fleet_pb2.Assignment(
            task=fleet_pb2.TASK_TRAIN, trainer=spec.trainer, uplink=uplink, leaves_out_resting=leaves_out
        )

    async def set_up(self, job: JobState, key: AttemptKey) -> fleet_pb2.Assignment:
        """Return the fields of an assignment that only this kind of job has."""
        return fleet_pb2.Assignment()

    # --- its updates and reports: report_intake ---

    def judge(self, job: JobState, assignment: Assignment) -> Verdict:
        """Judge whether a client may send an update now, before a byte of it is read.

        Raises `RefusedError` if clients of this kind send none.
        """
        return commands.ACCEPTED

    async def size_limit(self, job: JobState, assignment: Assignment) -> int:
        """Return the bytes that an update may have. May raise the errors of a plugin."""
        async with self._parts.blobs.local(job.latest.digest) as (base,):
            return report_validation.size_limit(base, job.spec.compression.uplink)

    def judge_claims(self, rule: aggregate.Rule, assignment: Assignment, request: fleet_pb2.ReportRequest) -> Verdict:
        """Judge the numbers of a report."""
        limits = self._parts.limits.metrics
        return report_validation.validate_claims(rule, request.num_examples, request.metrics, limits)

    async def validator(self, job: JobState, assignment: Assignment, base: Path) -> Validate:
        """Return the function that validates the file of an update; `base` is that of the job's latest version."""
        codec, turn = job.spec.compression.uplink, job.spec.turn(assignment.key.round)
        return lambda part, running: report_validation.validate_file(part, base, codec, running, turn)

    async def running_norm(self, job: JobState, assignment: Assignment) -> RunningNorm | None:
        """Return what measures an update while it arrives, so that its report need not read it again."""
        async with self._parts.blobs.local(job.latest.digest) as (base,):
            turn = job.spec.turn(assignment.key.round)
            return report_validation.running_norm(base, job.spec.compression.uplink, turn)

    def small_validator(self, job: JobState, base: Path) -> ValidateSmall | None:
        """Return the function that validates an update of a small model; None if only `validator` has one."""
        if job.spec.compression.uplink is not None:  # its codec may be that of a plugin
            return None
        return lambda update: report_validation.validate_content(update, base)

    def stores_rows(self, job: JobState) -> bool:
        """Return whether small updates and models may be rows of the database, which its backups and logs then have.

        Not if other processes read an update by its path, or if it must not be in them.
        """
        spec = job.spec
        is_local = spec.durability == "spool" and spec.pool is None and spec.server_step is None
        return is_local and not privacy_rules.disclosure_of(spec).is_charged

    # --- its steps and files between clients: fleet. Asked for the kind of the job's training. ---

    async def take_step(
        self, client: records.ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest
    ) -> fleet_pb2.StepResponse:
        """Take a step of a client; see `StepsHalf`. Raises `RefusedError`."""
        raise RefusedError(Code.INVALID_REQUEST, "clients of this job take no steps; expected Report or Fail")

    async def receive_file(
        self, assignment: Assignment, header: fleet_pb2.UploadHeader, messages: AsyncIterator[streams.UploadMessage]
    ) -> int:
        """Receive a file for another client; return the number of bytes stored so far. Raises `RefusedError`."""
        raise RefusedError(Code.STALE_ASSIGNMENT, "no silo waits for this file")

    async def count_received(self, assignment: Assignment, request: fleet_pb2.QueryUploadRequest) -> int:
        """Return the number of bytes of a file for another client that were received, where its upload resumes."""
        return 0

    def send_file(self, assignment: Assignment, request: fleet_pb2.DownloadRequest) -> AsyncIterator[bytes]:
        """Return the messages of a file from another client. Raises `RefusedError`."""
        raise RefusedError(Code.NOT_SENT_YET)

    # --- its versions: aggregation, leader ---

    def open_backend(
        self, job: JobState, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore
    ) -> backend.AggregationBackend:
        """Return the backend of an attempt; `find_job` returns the job as it is when the attempt commits."""
        if job.spec.pool is None:
            return backend.LocalAggregation(inputs, blobs)
        return backend.WithFallback(inputs, blobs, self._parts.pool.with_backend(job.spec.pool.backend))

    def begin_alone(self, job: JobState, command: commands.RunWarmStart) -> None:
        """Make the first version without clients. Asked for the kind of the job's training."""
        self._parts.training.begin(job, command)

    def end(self, key: AttemptKey) -> None:
        """Drop what `begin_alone` has begun for an attempt that has ended."""
        self._parts.training.end(key)

    # --- its data: leader ---

    async def keep(self, jobs: Sequence[JobState], attempts: Collection[str]) -> None:
        """Remove what an earlier process has left and none of these jobs needs. Called once, before `begin`.

        `jobs` are all of this kind, `attempts` the names of all stored attempts (`spool_file.name_attempt`).
        """

    def begin(self) -> None:
        """Start background tasks, after all jobs were resumed."""

    def on_stored(self, change: Change) -> None:
        """Delete what a stored change of a job makes obsolete."""

    async def close(self) -> None:
        """End what the half has started."""

    # --- what is shown of it: convert ---

    def show(self, job: JobState) -> admin_pb2.Job:
        """Return the fields of a job that only some kinds have."""
        return admin_pb2.Job(num_rounds=job.spec.rounds)


_Message = TypeVar("_Message")
Find = Callable[[JobState, Assignment], Awaitable[tuple[fleet_pb2.StepResponse, bool]]]
"""A function that returns the response for an assignment, and whether the client gets it at once."""


@dataclasses.dataclass(eq=False, repr=False)
class StepPolls:
    """The calls of clients that take steps, whatever the kind of their jobs: how long they wait, and what they send."""

    runner: Runner
    store: sql_jobs.JobStore
    clients: client_directory.ClientDirectory
    long_polls: LongPolls
    quotas: rate_limits.Quotas

    def job(self, job_id: str) -> JobState:
        """Return the coordinator's state of an existing job."""
        return self.runner.coordinator.jobs[job_id]

    async def wait(self, before: Assignment, wait_s: float, find: Find) -> fleet_pb2.StepResponse:
        """Return what `find` returns as soon as the client gets it at once, and after `wait_s` in every case."""
        clock = asyncio.get_running_loop().time
        ends_at = clock() + wait_s
        while True:
            with self.long_polls.open_step(*before.id) as changed:
                job = self.job(before.key.job_id)
                # Not in the job's state any more: another attempt has begun since.
                current = job.find(*before.id) or await self.store.find_assignment(before.token_hash)
                if current is None:
                    return refuse_step()
                response, is_next = await find(job, current)
                if is_next or clock() >= ends_at:
                    return response
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), ends_at - clock())
            await self.clients.find(before.client_id)  # it may have been revoked meanwhile

    def count(self, assignment: Assignment, num_bytes: int, limit: int, num_messages: int) -> None:
        """Refuse a message of more than `limit` bytes, and the bytes of more than `num_messages` in an attempt."""
        if num_bytes > limit:
            text = f"the message has {num_bytes} bytes; at most {limit} are accepted in this step"
            raise RefusedError(Code.TOO_LARGE, text)
        self.quotas.step(assignment.client_id, assignment.key, num_messages * limit, num_bytes)


class StepsHalf(ServerHalf, ABC, Generic[_Message]):
    """The half of a kind of job whose clients take steps."""

    content: ClassVar[Literal["secure", "gossip"]]
    """The field of requests with the message, and of responses with the input."""

    def __init__(self, parts: HalfParts, calls: StepPolls) -> None:
        super().__init__(parts)
        self._calls = calls

    @override
    async def take_step(
        self, client: records.ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest
    ) -> fleet_pb2.StepResponse:
        if (content := request.WhichOneof("content") or "unset") != self.content:
            text = f"the content of the step is {content}; expected {self.content} in this job"
            raise RefusedError(Code.INVALID_REQUEST, text)
        message = self._read(client, assignment, request)
        if (refusal := await self._receive(client, assignment, message)) is not None:
            return refusal
        wait_s = validation.wait_s(request.wait_s, self._parts.limits)
        return await self._calls.wait(assignment, wait_s, lambda job, current: self._find_input(job, current, message))

    # --- what differs by the kind -------------------------------------------------------------------------------

    @abstractmethod
    def _read(self, client: records.ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest) -> _Message:
        """Return the message of a request. Raises `RefusedError`."""

    @abstractmethod
    async def _receive(
        self, client: records.ClientRecord, assignment: Assignment, message: _Message
    ) -> fleet_pb2.StepResponse | None:
        """Validate a message, and submit it to the coordinator; return the refusal if it is not accepted.

        The same message again changes nothing. Raises `RefusedError`.
        """

    @abstractmethod
    async def _find_input(
        self, job: JobState, assignment: Assignment, message: _Message
    ) -> tuple[fleet_pb2.StepResponse, bool]:
        """Return the input after a message, and whether the client gets it at once, or what it gets after `wait_s`."""


def refuse_step(reason: states.Reason | None = None, text: str = "") -> fleet_pb2.StepResponse:
    """Return the response for an assignment that has ended for a reason, or is not known."""
    return fleet_pb2.StepResponse(refusal=convert.refusal(reason or states.Reason.STALE, RETRY_SOON, text))
