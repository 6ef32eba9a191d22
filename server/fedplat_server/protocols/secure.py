"""The server's half of jobs with secure aggregation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from fedplat import report_validation
from fedplat.aggregate import Rule
from fedplat.rounds import Assignment, AttemptKey, JobState, Verdict
from fedplat.rounds.states import AssignmentState, AttemptPhase, Reason
from fedplat.rounds.transition import ACCEPTED
from fedplat.secure_aggregation import encoding
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.aggregation.secure import MaskedAggregation
from fedplat_server.aggregation.secure_attempts import SecureAttempts
from fedplat_server.database.clients import ClientRecord
from fedplat_server.protocols.half import HalfParts, ServerHalf, Validate
from fedplat_server.protocols.secure_steps import SecureSteps
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.workers.attempt_inputs import AttemptInputs

_MASKING_STATES = frozenset({AssignmentState.SHARED, AssignmentState.UPLOADING})
"""States in which a client has the masks for its update."""


class SecureHalf(ServerHalf):
    """Jobs with secure aggregation: updates are masked, and the server learns their sum only."""

    def __init__(self, parts: HalfParts, steps: SecureSteps, secure: SecureAttempts) -> None:
        super().__init__(parts)
        self._secure = secure
        self._steps = steps

    @override
    async def set_up(self, job: JobState, key: AttemptKey) -> fleet_pb2.Assignment:
        setup = await self._secure.setup(job, key)
        return fleet_pb2.Assignment(secure_setup=setup.to_bytes())

    @override
    def judge(self, job: JobState, assignment: Assignment) -> Verdict:
        """Refuse an update of a client that cannot have masked it, so that it is never stored."""
        attempt = job.open_attempt
        collects = attempt is not None and attempt.phase is AttemptPhase.COLLECTING
        if collects and assignment.state in _MASKING_STATES:
            return ACCEPTED
        return Verdict(Reason.REJECTED_MESSAGE, "the update came before the client had its masks; take its steps first")

    @override
    async def size_limit(self, job: JobState, assignment: Assignment) -> int:
        return encoding.file_bytes(await self._secure.setup(job, assignment.key))

    @override
    def judge_claims(self, rule: Rule, assignment: Assignment, request: fleet_pb2.ReportRequest) -> Verdict:
        return report_validation.validate_secure_claims(request.num_examples, request.metrics)

    @override
    async def validator(self, job: JobState, assignment: Assignment, base: Path) -> Validate:
        setup = await self._secure.setup(job, assignment.key)
        return functools.partial(report_validation.validate_masked, setup=setup)

    @override
    async def take_step(
        self, client: ClientRecord, assignment: Assignment, request: fleet_pb2.StepRequest
    ) -> fleet_pb2.StepResponse:
        return await self._steps.take(client, assignment, request)

    @override
    def open_backend(
        self, job: JobState, find_job: Callable[[], JobState], inputs: AttemptInputs, blobs: BlobStore
    ) -> MaskedAggregation:
        return MaskedAggregation(find_job, inputs, blobs, self._secure)
