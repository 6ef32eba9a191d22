"""The server's halves of evaluations by clients, and of warm starts, in which no client takes part."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from typing_extensions import override

from fedplat import aggregate, report_validation
from fedplat.job import JobSpec
from fedplat.rounds import Assignment, Change, JobState, Verdict
from fedplat.rounds.protocols import warm_start
from fedplat.rounds.states import ENDED_JOBS, Reason
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.protocols.half import ServerHalf


class EvaluationHalf(ServerHalf):
    """Evaluations: clients get an evaluator, and report numbers only."""

    @override
    def make_task(self, spec: JobSpec) -> fleet_pb2.Assignment:
        assert spec.evaluation.clients is not None
        return fleet_pb2.Assignment(task=fleet_pb2.TASK_EVALUATE, trainer=spec.evaluation.clients.evaluator)

    @override
    def judge_claims(self, rule: aggregate.Rule, assignment: Assignment, request: fleet_pb2.ReportRequest) -> Verdict:
        limits = self._parts.limits.metrics
        verdict = report_validation.validate_claims(None, request.num_examples, request.metrics, limits)
        if verdict.accepted and request.digest:
            return Verdict(Reason.REJECTED_DIGEST, "an evaluation has no update")
        return verdict


class WarmStartHalf(ServerHalf):
    """Warm starts: the half of the job's training runs them, and this one owns their checkpoints."""

    @override
    async def keep(self, jobs: Sequence[JobState], attempts: Collection[str]) -> None:
        pending = {job.job_id for job in jobs if _is_pending(job)}
        await asyncio.to_thread(self._parts.training.keep, pending, {job.job_id for job in jobs})

    @override
    def on_stored(self, change: Change) -> None:
        if change.job.spec.warm_start is not None and not _is_pending(change.job):
            self._parts.training.forget(change.job.job_id)

    @override
    async def close(self) -> None:
        await self._parts.training.close()


def _is_pending(job: JobState) -> bool:
    """Return whether a job's warm start is still to run or running."""
    return warm_start.is_due(job) and job.status not in ENDED_JOBS
