"""Secure aggregation: rounds in phases, of which the server learns the sum only (`secure_phases`)."""

from __future__ import annotations

import dataclasses

from msgspec import structs

from fedplat.job import JobSpec
from fedplat.job.secure import group_minimum, num_groups, require_secure
from fedplat.rounds import attempts, restart
from fedplat.rounds.demand import Demand
from fedplat.rounds.events import (
    AggregationFailed,
    KeysAdvertised,
    MasksAnswered,
    SharesSent,
    SurvivorsConfirmed,
    UpdateReported,
)
from fedplat.rounds.protocols import averaging, secure_messages, secure_phases
from fedplat.rounds.protocols.base import AttemptSizes, Ending, RoundProtocol, register
from fedplat.rounds.records import Assignment, Attempt, JobState, SecureMessages
from fedplat.rounds.states import AssignmentState, AttemptPhase
from fedplat.rounds.transition import Context, Transition
from fedplat.secure_aggregation.setup import FEATURE


def _begin(job: JobState, context: Context) -> Transition:
    """Bar clients with invalid messages from the attempt that begins."""
    begun = averaging.begin(job, context)
    if begun.job.open_attempt is None:
        return begun
    return structs.replace(begun, job=structs.replace(begun.job, barred=secure_phases.bar_culprits(job)))


def _list_needs(spec: JobSpec) -> list[tuple[str, int]]:
    needs, needed = averaging.list_needs(spec), num_groups(spec) * group_minimum(spec)
    return [needs[0], (f"secure_aggregation: its groups need {needed:,} clients", needed), *needs[1:]]


def _demand(job: JobState, attempt: Attempt) -> Demand | None:
    demand = averaging.demand_cohort(job, attempt)
    return dataclasses.replace(demand, barred=frozenset(job.barred)) if demand is not None else None


def _on_reclaimed(job: JobState, assignment: Assignment, context: Context) -> Transition:
    """End the assignment of a client whose keys are lost."""
    if assignment.deadline_at > context.now and assignment.state is not AssignmentState.TRAINING:
        return secure_messages.end_without_keys(job, assignment)
    return attempts.reassign(job, assignment, context)


def _on_reported(job: JobState, assignment: Assignment, event: UpdateReported, context: Context) -> Transition:
    """Take a report that reveals nothing, while the attempt collects."""
    if not (verdict := secure_messages.judge_upload(job, assignment)).accepted:
        return Transition(job, verdict=verdict)
    return attempts.take_report(job, assignment, dataclasses.replace(event, norm=None), context)


def _blame(job: JobState, attempt: Attempt, event: AggregationFailed) -> tuple[JobState, str]:
    job, text = averaging.describe_failure(job, attempt, event)
    return secure_phases.reject_culprits(job, attempt, event.culprits, event.text), text


def _longest_s(job: JobState, assignment: Assignment) -> float:
    longest = job.spec.deadlines.training_s
    if assignment.state is AssignmentState.ADVERTISED:
        longest += require_secure(job.spec).step_s
    return min(longest, assignment.deadline_at - assignment.assigned_at)


def _resume(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Give the steps their whole time again: clients have to reconnect."""
    job = restart.bound_deadlines(job, context.now)
    if attempt.phase is not AttemptPhase.COMMITTING and job.spec.durability != "memory":
        job = secure_phases.resume(job, context)
    return restart.refold(job, attempt, context)


SECURE = register(
    RoundProtocol(
        name="secure",
        has_masks=True,
        features=frozenset({FEATURE}),
        first_phase=AttemptPhase.ADVERTISING,
        handlers={
            KeysAdvertised: secure_messages.on_keys,
            SharesSent: secure_messages.on_shares,
            SurvivorsConfirmed: secure_messages.on_confirmation,
            MasksAnswered: secure_messages.on_answer,
        },
        list_needs=_list_needs,
        begin=_begin,
        sizes=lambda job: AttemptSizes(job.spec.selection.goal, secure_phases.minimum(job.spec), job.spec.num_wanted),
        advance=secure_phases.advance,
        count_phase=secure_messages.count_phase,
        demand=_demand,
        make_part=SecureMessages,
        list_messages=secure_messages.list_sent,
        forget_messages=secure_messages.forget,
        longest_s=_longest_s,
        on_reclaimed=_on_reclaimed,
        judge_upload=secure_messages.judge_upload,
        on_reported=_on_reported,
        judge_report=lambda job, attempt, reported, event: (job, secure_messages.judge_report(event)),
        weigh=lambda job, reported, staleness: 1.0,  # its own is inside
        judge_end=lambda job, attempt, context: Ending.WAIT,  # `secure_phases.advance` closes it
        on_aggregation_failed=_blame,
        resume=_resume,
    )
)
