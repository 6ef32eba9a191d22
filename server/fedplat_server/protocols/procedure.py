"""The server's half of jobs with a procedure: what it takes a reply for, and the sum of all."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from fedplat import report_validation
from fedplat.aggregate import Rule
from fedplat.job.secure import build_exact_setup, group_maximum
from fedplat.job.tables import require_procedure
from fedplat.procedures import ExactSum, ReplySchema, ReplyTotals, contract, versions
from fedplat.rounds import Assignment, AttemptKey, JobState, Verdict
from fedplat.secure_aggregation import encoding
from fedplat.secure_aggregation.setup import AnySetup, ExactEncoding
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.aggregation import procedure
from fedplat_server.aggregation.backend import Aggregate, run_to_the_end
from fedplat_server.aggregation.secure_attempts import SecureAttempts
from fedplat_server.protocols.half import HalfParts, ServerHalf, StepPolls, Validate
from fedplat_server.protocols.secure import GroupSum, MaskedAggregation, SecureHalf, UnmaskedSums
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


def _build_setup(job: JobState, key: AttemptKey, message: Path) -> AnySetup:
    schema = procedure.find_schema(job.spec, message)
    words = schema.encoding(group_maximum(job.spec))
    return build_exact_setup(job.spec, key.job_id, key.round, key.number, job.latest.digest, words)


class SecureProcedureHalf(SecureHalf):
    """Jobs with a procedure and secure aggregation: the server gets the sums of replies only."""

    def __init__(self, parts: HalfParts, calls: StepPolls, attempts: SecureAttempts) -> None:
        super().__init__(parts, calls, attempts.with_setups(_build_setup))
        self._schemas = ReplySchemas(parts.blobs)

    @override
    async def set_up(self, job: JobState, key: AttemptKey) -> fleet_pb2.Assignment:
        assignment = await describe_step(job, self._schemas)
        assignment.MergeFrom(await super().set_up(job, key))
        return assignment

    @override
    def open_backend(
        self, job: JobState, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore
    ) -> MaskedAggregation:
        return MaskedAggregation(find_job, self._secure, _ReplySums(inputs, blobs))


class _ReplySums(UnmaskedSums):
    """Sums of replies: the procedure makes the next version of them."""

    def __init__(self, inputs: AttemptInputs, blobs: BlobStore) -> None:
        self._inputs, self._blobs = inputs, blobs

    @override
    async def commit(self, job: JobState, sums: Sequence[GroupSum], draft: Path | None) -> Aggregate:
        return await run_to_the_end(self._commit, job, sums)

    def _commit(self, job: JobState, sums: Sequence[GroupSum]) -> Aggregate:
        schema = procedure.find_schema(self._inputs.spec, Path(self._inputs.base_path))
        total = ExactSum(schema)
        for each in sums:
            assert isinstance(each.setup.encoding, ExactEncoding)
            integers = encoding.decode_exact(each.setup.encoding, each.total, each.num_survivors)
            total.merge(ReplyTotals(schema, integers, each.num_survivors))
        assert job.open_attempt is not None
        clients = tuple(each.client_id for each in job.open_attempt.reported)
        return procedure.make_aggregate(job, self._inputs, self._blobs, total.totals, clients)
