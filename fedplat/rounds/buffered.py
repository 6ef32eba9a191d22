"""What is different in a job with a buffer (`[mode] kind = "buffered"`): FedBuff. Pure functions.

Nguyen et al. 2022, arXiv 2106.06639, Algorithm 1. An attempt to train is the filling of one buffer. As long as it
collects, the job wants clients until `concurrency` are at work, and each begins with the latest version. `goal`
reports close it. Assignments that are busy then are *carried*: the job keeps them, over the commit and a federated
evaluation, until the next attempt takes them over (`take_over`). A report that comes meanwhile waits there, and is
folded in the next attempt. An update's staleness is the number of versions that were committed since its base version,
at the moment when an attempt takes it in; it does not change any more then, since the next version is made of it.
"""

from __future__ import annotations

from msgspec import structs

from fedplat.rounds import assignments, reporting
from fedplat.rounds.commands import Command
from fedplat.rounds.records import Assignment, AssignmentSet, Attempt, JobState, make_assignment_set
from fedplat.rounds.states import (
    ATTEMPT_TRANSITIONS,
    AssignmentState,
    AttemptPhase,
    Reason,
    require,
)
from fedplat.rounds.transition import Context, Transition


def has_carried_over(job: JobState) -> bool:
    """Return whether the job carries open assignments, which the next attempt has to take over."""
    return job.carried_over.num_busy > 0 or job.carried_over.num_reported > 0


def hold_report(job: JobState, reported: Assignment) -> JobState:
    """Let the report of a carried assignment wait for the next attempt."""
    waiting = structs.replace(reported, report_number=job.carried_over.next_report)
    return structs.replace(job, carried_over=job.carried_over.with_assignments([waiting]))


def carry_over(job: JobState, attempt: Attempt) -> tuple[JobState, Attempt]:
    """Move the busy assignments of an attempt that closes to those that the job carries."""
    staying = [each for each in attempt.assignments.values() if not each.is_busy]
    carried = make_assignment_set([*_open(job.carried_over), *attempt.busy])
    bare = structs.replace(attempt, assignments={}, counts={}, next_deadline=None)
    return structs.replace(job, carried_over=carried), bare.with_assignments(staying)


def take_over(job: JobState, context: Context) -> Transition:
    """Let the new attempt take over the carried assignments: all busy ones, and as many reports as its buffer holds."""
    attempt, mode = job.attempt, job.spec.buffered
    assert attempt is not None
    assert mode is not None
    stale: list[Assignment] = []
    fresh: list[Assignment] = []
    for each in job.carried_over.reported:
        too_stale = mode.is_too_stale(attempt.base_version - each.base_version)
        (stale if too_stale else fresh).append(each)
    accepted = [
        reporting.accept_report(job, attempt, each, number) for number, each in enumerate(fresh[: attempt.goal], 1)
    ]
    # More may wait than a buffer holds: the rule divides by its size.
    left = [structs.replace(each, report_number=n) for n, each in enumerate(fresh[attempt.goal :], 1)]
    ended = [assignments.end(each, AssignmentState.DROPPED, Reason.TOO_STALE) for each in stale]
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.COLLECTING)
    attempt = structs.replace(attempt, phase=phase).with_assignments([*ended, *accepted, *job.carried_over.busy])
    after = structs.replace(job, attempt=attempt, carried_over=make_assignment_set(left))
    after = after if attempt.num_busy else reporting.await_clients(after, context)
    return Transition(after, reporting.fold_commands(attempt, accepted))


def stop_stale(job: JobState) -> tuple[JobState, tuple[Command, ...]]:
    """Stop the clients whose base version has become too old by the latest one."""
    mode = job.spec.buffered
    if mode is None or mode.max_staleness is None:
        return job, ()
    late = [
        assignments.end(each, AssignmentState.LATE, Reason.TOO_STALE)
        for each in job.carried_over.busy
        if mode.is_too_stale(job.latest.version - each.base_version)
    ]
    if not late:
        return job, ()
    return structs.replace(job, carried_over=job.carried_over.with_assignments(late)), assignments.abort_commands(late)


def forget_updates(job: JobState) -> JobState:
    """Drop the accepted updates, which a job in memory loses when the server dies. Busy clients go on."""

    def drop(crew: AssignmentSet) -> list[Assignment]:
        return [assignments.end(each, AssignmentState.DROPPED, Reason.ATTEMPT_ABANDONED) for each in crew.reported]

    attempt = job.attempt
    if attempt is not None and reporting.fills_buffer(job, attempt) and attempt.num_reported:
        attempt = attempt.with_assignments(drop(attempt))
    carried = (
        job.carried_over.with_assignments(drop(job.carried_over)) if job.carried_over.num_reported else job.carried_over
    )
    return structs.replace(job, attempt=attempt, carried_over=carried)


def _open(crew: AssignmentSet) -> list[Assignment]:
    return [each for each in crew.assignments.values() if each.is_open]
