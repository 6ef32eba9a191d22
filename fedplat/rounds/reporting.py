"""How an attempt waits for clients and accepts reports, in synchronous and buffered jobs. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import structs

from fedplat.rounds import influence
from fedplat.rounds.commands import Command, Fold
from fedplat.rounds.records import Assignment, AssignmentSet, Attempt, JobState, make_assignment_set
from fedplat.rounds.states import WORKING_PHASES, AssignmentState, AttemptKind, AttemptPhase, Reason
from fedplat.rounds.transition import ACCEPTED, Context, Verdict

MAX_DURATIONS = 500
"""Number of past durations from which an adaptive deadline is computed."""


def fills_buffer(job: JobState, attempt: Attempt) -> bool:
    """Return whether the attempt fills the buffer of an asynchronous job."""
    return job.spec.buffered is not None and attempt.kind is AttemptKind.TRAIN


def is_secure(job: JobState, attempt: Attempt) -> bool:
    """Return whether the updates of the attempt are aggregated securely; those of evaluations never are."""
    return job.spec.secure_aggregation is not None and attempt.kind is AttemptKind.TRAIN


def wants_clients(job: JobState, attempt: Attempt) -> bool:
    """Return whether newly drawn clients are given assignments."""
    if attempt.phase is AttemptPhase.SELECTING:
        return True
    return job.fills_cohort or (attempt.phase is AttemptPhase.COLLECTING and fills_buffer(job, attempt))


def await_clients(job: JobState, context: Context) -> JobState:
    """Wait for clients to check in for `deadlines.selection_s`, since none works for the attempt."""
    assert job.attempt is not None
    ends_at = context.now + job.spec.deadlines.selection_s
    return structs.replace(job, attempt=structs.replace(job.attempt, selection_ends_at=ends_at))


def is_in_attempt(job: JobState, assignment: Assignment) -> bool:
    """Return whether an assignment belongs to the last attempt, not to those carried over."""
    return job.attempt is not None and job.attempt.find(assignment.key, assignment.client_id) is not None


def measure_duration(job: JobState, assignment: Assignment, context: Context) -> JobState:
    """Remember how long a client took for its training, and also for its upload unless it sends its keys first."""
    durations = (*job.durations, context.now - assignment.assigned_at)[-MAX_DURATIONS:]
    return structs.replace(job, durations=durations)


def accept_report(job: JobState, attempt: Attempt, reported: Assignment, number: int) -> Assignment:
    """Return the report as accepted by the attempt: with its staleness, and its weight by the current claims.

    Later reports may lower the weight (`influence.reweigh`). That of a masked update is 1: its own is inside.
    """
    staleness = attempt.base_version - reported.base_version
    most = influence.limit_by_claims(job) if attempt.kind is AttemptKind.TRAIN else math.inf
    weight = 1.0 if reported.secure is not None else job.spec.weight(reported.num_examples, staleness, most)
    return structs.replace(reported, folded_into=attempt.key, staleness=staleness, weight=weight, report_number=number)


def fold_commands(attempt: Attempt, accepted: Iterable[Assignment]) -> tuple[Command, ...]:
    """Return the commands that add accepted updates to the attempt's sum."""
    if attempt.kind is not AttemptKind.TRAIN:
        return ()
    return tuple(Fold(attempt.key, each.id, each.digest, each.contribution, each.base_version) for each in accepted)


def needs_update(job: JobState, assignment: Assignment) -> bool:
    """Return whether the update of an assignment must be kept, in whole or in part.

    This applies to open assignments, and to every update that the open attempt has accepted: one that was dropped since
    may be in use at this moment.
    """
    if assignment.kind is not AttemptKind.TRAIN or job.spec.gossip is not None:
        return False
    attempt = job.open_attempt
    return assignment.is_open or (attempt is not None and assignment.folded_into == attempt.key)


def rebuild_attempt(attempt: Attempt, rows: Iterable[Assignment]) -> tuple[Attempt, AssignmentSet]:
    """Return the last attempt of a job with its assignments, and the assignments carried over, from stored rows.

    `attempt` has no assignments yet. The rows are those made in the attempt, those folded into it, and all that are
    open. Ended assignments that were carried over are left out, because nothing depends on them.
    """
    own: list[Assignment] = []
    carried: list[Assignment] = []
    collects = attempt.kind is AttemptKind.TRAIN and attempt.phase in {AttemptPhase.SELECTING, *WORKING_PHASES}
    for row in rows:
        if row.is_busy:
            (own if collects or row.kind is AttemptKind.EVALUATE else carried).append(row)
        elif row.state is AssignmentState.REPORTED and row.folded_into is None:
            carried.append(row)
        elif (row.folded_into or row.key) == attempt.key:
            own.append(row)
    return attempt.with_assignments(own), make_assignment_set(carried)


def verdict_on_report(assignment: Assignment | None, digest: str) -> Verdict:
    """Return the answer to a report on an assignment that has ended; a repeated report is accepted again."""
    if assignment is not None and assignment.state in (AssignmentState.REPORTED, AssignmentState.MERGED):
        same = assignment.digest == digest
        return ACCEPTED if same else Verdict(Reason.REJECTED_CONFLICT)
    return verdict_on_ended(assignment)


def verdict_on_ended(assignment: Assignment | None) -> Verdict:
    """Return the answer to a message on an assignment that has ended, or that the job does not have."""
    if assignment is None or assignment.reason is None:
        return Verdict(Reason.STALE)
    return Verdict(assignment.reason, assignment.text)
