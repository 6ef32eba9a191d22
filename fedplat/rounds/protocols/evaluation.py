"""Federated evaluation: clients score the committed model and report metrics only. It makes no version."""

from __future__ import annotations

import math

from fedplat.job.sections import ClientEvaluation
from fedplat.rounds import attempts, closing, demand, states
from fedplat.rounds.commands import ACCEPTED, Context, Transition, Verdict
from fedplat.rounds.protocols.base import AttemptSizes, Ending, RoundProtocol, register
from fedplat.rounds.records import Assignment, Attempt, JobState
from fedplat.sampling import Uniform


def begin(job: JobState, context: Context) -> Transition | None:
    """Open an evaluation after a round that is due for one."""
    evaluation, last = job.spec.evaluation, job.attempt
    if evaluation.clients is None or last is None or last.kind is not states.AttemptKind.TRAIN:
        return None
    if last.phase is not states.AttemptPhase.COMMITTED or not evaluation.is_due(job.round, job.spec.rounds):
        return None
    return Transition(attempts.open_attempt(job, states.AttemptKind.EVALUATE, context))


def _options(job: JobState) -> ClientEvaluation:
    assert job.spec.evaluation.clients is not None
    return job.spec.evaluation.clients


def _size(job: JobState) -> AttemptSizes:
    clients = _options(job)
    return AttemptSizes(clients.goal, clients.minimum, clients.goal)


def _advance(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Commit: there is nothing to aggregate. It is a step of its own, as the history has a row for each state."""
    is_closed = attempt.phase is states.AttemptPhase.COMMITTING
    return Transition(closing.commit(job, attempt, context)) if is_closed else None


def _demand(job: JobState, attempt: Attempt) -> demand.Demand | None:
    if attempt.phase is not states.AttemptPhase.SELECTING:
        return None
    return demand.Demand(
        attempt.key,
        attempt.kind,
        job.spec.population,
        job.spec.selection.where,
        _options(job).evaluator,
        attempt.target,
        attempt.target,
        frozenset[str](),
        Uniform(),
        role=demand.EVALUATOR,
        digest=job.digest,
        needs_approval=job.spec.needs_approval,
    )


def _judge_upload(job: JobState, assignment: Assignment) -> Verdict:
    """Refuse: otherwise a client could extend its deadline by `upload_s`."""
    return Verdict(states.Reason.REJECTED_DIGEST, "an evaluation has no update")


def _judge_end(job: JobState, attempt: Attempt, context: Context) -> Ending:
    if attempt.num_reported + attempt.num_busy < attempt.minimum:
        return Ending.FAIL
    return Ending.WAIT if attempt.num_busy and attempt.num_reported < attempt.goal else Ending.CLOSE


EVALUATION = register(
    RoundProtocol(
        name="evaluation",
        folds=False,
        retries=False,
        begin=begin,
        sizes=_size,
        advance=_advance,
        demand=_demand,
        timeouts=lambda job: (_options(job).timeout_s, 0.0),
        longest_s=lambda job, assignment: _options(job).timeout_s,
        judge_upload=_judge_upload,
        judge_report=lambda job, attempt, reported, event: (job, ACCEPTED),
        weigh=lambda job, reported, staleness: job.spec.weight(reported.num_examples, staleness, math.inf),
        judge_end=_judge_end,
    )
)
