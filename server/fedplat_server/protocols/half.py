"""What a server does differently for one kind of job or attempt. The defaults are those of averaging."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path

from fedplat import aggregate, report_validation
from fedplat.codecs import container
from fedplat.job import JobSpec
from fedplat.rounds import Assignment, AttemptKey, Change, JobState, Verdict
from fedplat.rounds.commands import ACCEPTED, RunWarmStart
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_server.aggregation import backend, pooled
from fedplat_server.config import Limits
from fedplat_server.database.clients import ClientRecord
from fedplat_server.errors import Code, RefusedError
from fedplat_server.messages.streams import UploadMessage
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.training.server_training import ServerTraining
from fedplat_server.workers.client import WorkerPool
from fedplat_server.workers.task_inputs import AttemptInputs

Validate = Callable[[Path], float | Verdict | None]
"""A function that returns the norm of the update in a file, or its refusal. None: it is masked, and has no norm."""


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
        return fleet_pb2.Assignment(task=fleet_pb2.TASK_TRAIN, trainer=spec.trainer, uplink=uplink)

    async def set_up(self, job: JobState, key: AttemptKey) -> fleet_pb2.Assignment:
        """Return the fields of an assignment that only this kind of job has."""
        return fleet_pb2.Assignment()

    # --- its updates and reports: report_intake ---

    def judge(self, job: JobState, assignment: Assignment) -> Verdict:
        """Judge whether a client may send an update now, before a byte of it is read.

        Raises `RefusedError` if clients of this kind send none.
        """
        return ACCEPTED

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
        return functools.partial(report_validation.validate_file, base=base, codec=job.spec.compression.uplink)

    # --- its steps and files between clients: fleet. Asked for the kind of the job's training. ---

    async def take_step(
        self, client: ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest
    ) -> fleet_pb2.StepResponse:
        """Take a step of a client; see `steps`. Raises `RefusedError`."""
        raise RefusedError(Code.INVALID_REQUEST, "clients of this job take no steps; expected Report or Fail")

    async def receive_file(
        self, assignment: Assignment, header: fleet_pb2.UploadHeader, messages: AsyncIterator[UploadMessage]
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
        return pooled.WithFallback(inputs, blobs, self._parts.pool.with_backend(job.spec.pool.backend))

    def begin_alone(self, job: JobState, command: RunWarmStart) -> None:
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
