"""How an attempt waits for clients and accepts reports. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from fedplat.rounds.commands import Command, Fold
from fedplat.rounds.protocols.base import protocol_of
from fedplat.rounds.records import Assignment, AssignmentSet, Attempt, JobState, make_assignment_set
from fedplat.rounds.states import HAVE_UPDATES, WORKING_PHASES, AssignmentState, AttemptPhase, Reason
from fedplat.rounds.transition import ACCEPTED, Context, Verdict

MAX_DURATIONS = 500
"""Number of past durations from which an adaptive deadline is computed."""


def await_clients(job: JobState, context: Context) -> JobState:
    """Wait for clients to check in for `deadlines.selection_s`, since none works for the attempt."""
    assert job.attempt is not None
    ends_at = context.now + job.spec.deadlines.selection_s
    return structs.replace(job, attempt=structs.replace(job.attempt, selection_ends_at=ends_at))


def is_in_attempt(job: JobState, assignment: Assignment) -> bool:
    """Return whether an assignment belongs to the last attempt, not to those carried over."""
    return job.attempt is not None and job.attempt.find(assignment.key, assignment.client_id) is not None


def hold_report(job: JobState, reported: Assignment) -> JobState:
    """Queue the report of a carried-over assignment for the next attempt."""
    waiting = structs.replace(reported, report_number=job.carried_over.next_report)
    return structs.replace(job, carried_over=job.carried_over.with_assignments([waiting]))


def measure_duration(job: JobState, assignment: Assignment, context: Context) -> JobState:
    """Remember how long a client took for its training, and also for its upload unless it sends its keys first."""
    durations = (*job.durations, context.now - assignment.assigned_at)[-MAX_DURATIONS:]
    return structs.replace(job, durations=durations)


def accept_report(job: JobState, attempt: Attempt, reported: Assignment, number: int) -> Assignment:
    """Return the report as accepted by the attempt: with its staleness, and its weight by the current claims.

    Later reports may lower the weight (`influence.reweigh`).
    """
    staleness = attempt.base_version - reported.base_version
    weight = protocol_of(job, attempt.kind).weigh(job, reported, staleness)
    return structs.replace(reported, folded_into=attempt.key, staleness=staleness, weight=weight, report_number=number)


def fold_commands(attempt: Attempt, accepted: Iterable[Assignment]) -> tuple[Command, ...]:
    """Return the commands that add accepted updates to the attempt's sum."""
    if attempt.kind not in HAVE_UPDATES:
        return ()
    return tuple(Fold(attempt.key, each.id, each.digest, each.contribution, each.base_version) for each in accepted)


def needs_update(job: JobState, assignment: Assignment) -> bool:
    """Return whether the update of an assignment must be kept, in whole or in part.

    This applies to open assignments, and to every update that the open attempt has accepted: one that was dropped since
    may be in use at this moment.
    """
    protocol = protocol_of(job, assignment.kind)
    if not (protocol.folds and protocol.keeps_updates):
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
    collects = attempt.kind in HAVE_UPDATES and attempt.phase in {AttemptPhase.SELECTING, *WORKING_PHASES}
    for row in rows:
        if row.is_busy:
            (own if collects or row.kind not in HAVE_UPDATES else carried).append(row)
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
