"""The server's half of jobs with a procedure: what it takes a reply for, and the sum of all."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from fedplat import report_validation
from fedplat.aggregate import Rule
from fedplat.job.tables import require_procedure
from fedplat.procedures import ReplySchema, contract, versions
from fedplat.rounds import Assignment, AttemptKey, JobState, Verdict
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.aggregation import procedure
from fedplat_server.protocols.half import HalfParts, ServerHalf, Validate
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.task_inputs import AttemptInputs

MAX_REMEMBERED = 64
"""Steps, at most one of each job, whose form of replies is kept in memory."""


class ReplySchemas:
    """The forms of the replies to the latest messages of jobs, which are computed once for each step."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._found: OrderedDict[str, tuple[str, ReplySchema]] = OrderedDict()

    async def of(self, job: JobState) -> ReplySchema:
        """Return the form of the replies to a job's latest message. May raise the errors of a plugin."""
        digest = job.latest.digest
        if (known := self._found.get(job.job_id)) is not None and known[0] == digest:
            return known[1]
        async with self._blobs.local(digest) as (message,):
            schema = await asyncio.to_thread(procedure.find_schema, job.spec, message)
        self._found[job.job_id] = digest, schema
        self._found.move_to_end(job.job_id)
        if len(self._found) > MAX_REMEMBERED:
            self._found.popitem(last=False)
        return schema


async def describe_step(job: JobState, schemas: ReplySchemas) -> fleet_pb2.Assignment:
    """Return the fields of an assignment with what the server takes a reply for."""
    options = require_procedure(job.spec)
    schema = await schemas.of(job)
    found = fleet_pb2.ProcedureSetup(
        options=versions.encode_options(options),
        version=contract.version_of(options),
        schema_digest=schema.digest,
    )
    return fleet_pb2.Assignment(procedure=found)


class ProcedureHalf(ServerHalf):
    """Jobs with a procedure, whose server gets the reply of each site."""

    def __init__(self, parts: HalfParts) -> None:
        super().__init__(parts)
        self._schemas = ReplySchemas(parts.blobs)

    @override
    async def set_up(self, job: JobState, key: AttemptKey) -> fleet_pb2.Assignment:
        return await describe_step(job, self._schemas)

    @override
    async def size_limit(self, job: JobState, assignment: Assignment) -> int:
        return (await self._schemas.of(job)).file_size_bytes

    @override
    def judge_claims(self, rule: Rule, assignment: Assignment, request: fleet_pb2.ReportRequest) -> Verdict:
        return report_validation.validate_reply_claims(request.num_examples, request.metrics)

    @override
    async def validator(self, job: JobState, assignment: Assignment, base: Path) -> Validate:
        schema = await self._schemas.of(job)
        return lambda part, _: report_validation.validate_integers(part.read(), schema)

    @override
    async def running_norm(self, job: JobState, assignment: Assignment) -> None:
        return None  # a reply has none

    @override
    def small_validator(self, job: JobState, base: Path) -> None:
        return None  # a reply is not of the form of a version

    @override
    def open_backend(
        self, job: JobState, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore
    ) -> procedure.ProcedureAggregation:
        return procedure.ProcedureAggregation(find_job, inputs, blobs)
