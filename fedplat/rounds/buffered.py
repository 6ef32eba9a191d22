"""The rules of a job with a buffer (`[mode] kind = "buffered"`): FedBuff. Pure functions.

Nguyen et al. 2022, arXiv 2106.06639, Algorithm 1. An attempt to train fills one buffer. While it collects, the job
draws clients until `concurrency` are at work, and each begins with the latest version. `goal` reports close the
attempt. Assignments that are busy then are *carried over*: the job keeps them during the commit and a federated
evaluation, until the next attempt takes them over (`take_over`). A report that arrives in between waits, and is folded
in the next attempt. An update's staleness is the number of versions committed after its base version when an attempt
accepts it. It stays fixed from then on, because the next version is made from the update.
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
    """Return whether the job has open assignments that the next attempt must take over."""
    return job.carried_over.num_busy > 0 or job.carried_over.num_reported > 0


def carry_over(job: JobState, attempt: Attempt) -> tuple[JobState, Attempt]:
    """Move the busy assignments of a closing attempt to those that the job carries over."""
    staying = [each for each in attempt.assignments.values() if not each.is_busy]
    carried = make_assignment_set([*_open(job.carried_over), *attempt.busy])
    bare = structs.replace(attempt, assignments={}, counts={}, next_deadline=None)
    return structs.replace(job, carried_over=carried), bare.with_assignments(staying)


def take_over(job: JobState, context: Context) -> Transition:
    """Let the new attempt take over carried assignments: all busy ones, and as many reports as its buffer holds.

    Reports that have become too stale are dropped.
    """
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
    # More reports may wait than a buffer holds, and the rule divides by the buffer's size.
    waiting = [structs.replace(each, report_number=n) for n, each in enumerate(fresh[attempt.goal :], 1)]
    ended = [assignments.end(each, AssignmentState.DROPPED, Reason.TOO_STALE) for each in stale]
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.COLLECTING)
    attempt = structs.replace(attempt, phase=phase).with_assignments([*ended, *accepted, *job.carried_over.busy])
    after = structs.replace(job, attempt=attempt, carried_over=make_assignment_set(waiting))
    after = after if attempt.num_busy else reporting.await_clients(after, context)
    return Transition(after, reporting.fold_commands(attempt, accepted))


def stop_stale(job: JobState) -> tuple[JobState, tuple[Command, ...]]:
    """Stop the clients whose base version is too old compared with the latest one."""
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


def _open(group: AssignmentSet) -> list[Assignment]:
    return [each for each in group.assignments.values() if each.is_open]
