"""What is different in a job with a buffer (`[mode] kind = "buffered"`): FedBuff. Pure functions.

Nguyen et al. 2022, arXiv 2106.06639, Algorithm 1. An attempt to train is the filling of one buffer. As long as it
collects, the job wants clients until `concurrency` are at work, and each begins with the latest version. `goal`
reports close it. Who works then is *carried*: the job keeps these assignments, over the commit and a federated
evaluation, until the next attempt takes them over (`take_over`). A report that comes meanwhile waits there, and is
folded in the next attempt. An update's staleness is the number of versions that were committed since its base version,
at the moment when an attempt takes it in; it does not change any more then, since the next version is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import structs

from fedplat.rounds import assignments, influence
from fedplat.rounds.commands import Command, Fold
from fedplat.rounds.records import NOBODY, Assignment, Attempt, Crew, JobState
from fedplat.rounds.states import (
    ATTEMPT_TRANSITIONS,
    AssignmentState,
    AttemptKind,
    AttemptPhase,
    Reason,
    require,
)
from fedplat.rounds.transition import Context, Transition


def fills(job: JobState, attempt: Attempt) -> bool:
    """Whether an attempt fills a buffer."""
    return job.spec.buffered is not None and attempt.kind is AttemptKind.TRAIN


def wants_clients(job: JobState, attempt: Attempt) -> bool:
    """Whether clients that are drawn now are given work."""
    return attempt.phase is AttemptPhase.SELECTING or (attempt.phase is AttemptPhase.COLLECTING and fills(job, attempt))


def taken_in(job: JobState, attempt: Attempt, reported: Assignment, number: int) -> Assignment:
    """A report in its attempt: now it is known how stale it is, and what it counts for unless the others say less."""
    staleness = attempt.base_version - reported.base_version
    most = influence.most_by_claims(job) if attempt.kind is AttemptKind.TRAIN else math.inf
    weight = job.spec.weight(reported.num_examples, staleness, most)
    return structs.replace(reported, buffer=attempt.key, staleness=staleness, weight=weight, report_number=number)


def folds(attempt: Attempt, taken: Iterable[Assignment]) -> tuple[Command, ...]:
    """What adds updates to the attempt's sum."""
    if attempt.kind is not AttemptKind.TRAIN:
        return ()
    return tuple(
        Fold(attempt.key, each.client_id, each.digest, each.contribution, each.key, each.base_version) for each in taken
    )


def carries(job: JobState) -> bool:
    """Whether there is somebody whom an attempt has to take over."""
    return job.carried.num_busy > 0 or job.carried.num_reported > 0


def wait(job: JobState, reported: Assignment) -> JobState:
    """A report of a carried assignment waits for the next attempt."""
    waiting = structs.replace(reported, report_number=job.carried.next_report)
    return structs.replace(job, carried=job.carried.with_assignments([waiting]))


def await_clients(job: JobState, context: Context) -> JobState:
    """Nobody is at work: gives clients the time of a selection to come."""
    assert job.attempt is not None
    ends_at = context.now + job.spec.deadlines.selection_s
    return structs.replace(job, attempt=structs.replace(job.attempt, selection_ends_at=ends_at))


def carry(job: JobState, attempt: Attempt) -> tuple[JobState, Attempt]:
    """Moves who works for an attempt that closes to those whom the job carries."""
    staying = [each for each in attempt.assignments.values() if not each.is_busy]
    carried = _crew([*_open(job.carried), *attempt.busy])
    bare = structs.replace(attempt, assignments={}, counts={}, next_deadline=None)
    return structs.replace(job, carried=carried), bare.with_assignments(staying)


def take_over(job: JobState, context: Context) -> Transition:
    """The new attempt takes over whom the job carries; of the reports that wait, as many as its buffer holds."""
    attempt, mode = job.attempt, job.spec.buffered
    assert attempt is not None
    assert mode is not None
    stale: list[Assignment] = []
    fresh: list[Assignment] = []
    for each in job.carried.reported:
        too_stale = mode.is_too_stale(attempt.base_version - each.base_version)
        (stale if too_stale else fresh).append(each)
    taken = [taken_in(job, attempt, each, number) for number, each in enumerate(fresh[: attempt.goal], 1)]
    # More may wait than a buffer holds: the rule divides by its size.
    left = [structs.replace(each, report_number=n) for n, each in enumerate(fresh[attempt.goal :], 1)]
    ended = [assignments.ended(each, AssignmentState.DROPPED, Reason.TOO_STALE) for each in stale]
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.COLLECTING)
    attempt = structs.replace(attempt, phase=phase).with_assignments([*ended, *taken, *job.carried.busy])
    after = structs.replace(job, attempt=attempt, carried=_crew(left))
    return Transition(after if attempt.num_busy else await_clients(after, context), folds(attempt, taken))


def stop_stale(job: JobState) -> tuple[JobState, tuple[Command, ...]]:
    """Stops the clients whose base version has become too old by the latest one."""
    mode = job.spec.buffered
    if mode is None or mode.max_staleness is None:
        return job, ()
    late = [
        assignments.ended(each, AssignmentState.LATE, Reason.TOO_STALE)
        for each in job.carried.busy
        if mode.is_too_stale(job.latest.version - each.base_version)
    ]
    if not late:
        return job, ()
    return structs.replace(job, carried=job.carried.with_assignments(late)), assignments.aborts(late)


def forget_updates(job: JobState) -> JobState:
    """The updates that were accepted are lost: those of jobs in memory are, when the server dies. Who works goes on."""

    def lost(crew: Crew) -> list[Assignment]:
        return [assignments.ended(each, AssignmentState.DROPPED, Reason.ATTEMPT_ABANDONED) for each in crew.reported]

    attempt = job.attempt
    if attempt is not None and fills(job, attempt) and attempt.num_reported:
        attempt = attempt.with_assignments(lost(attempt))
    carried = job.carried.with_assignments(lost(job.carried)) if job.carried.num_reported else job.carried
    return structs.replace(job, attempt=attempt, carried=carried)


def restored(attempt: Attempt, rows: Iterable[Assignment]) -> tuple[Attempt, Crew]:
    """The last attempt of a job and whom the job carries, of the assignments that a store has.

    `attempt` is without its crew. The rows are those that were made in the attempt, those that were taken into it, and
    all that are open. Of who is carried, those that have ended are not given back: nothing follows from them.
    """
    mine: list[Assignment] = []
    carried: list[Assignment] = []
    collects = attempt.kind is AttemptKind.TRAIN and attempt.phase in (
        AttemptPhase.SELECTING,
        AttemptPhase.COLLECTING,
    )
    for row in rows:
        if row.is_busy:
            (mine if collects or _evaluates(attempt, row) else carried).append(row)
        elif row.state is AssignmentState.REPORTED and row.buffer is None:
            carried.append(row)
        elif (row.buffer or row.key) == attempt.key:
            mine.append(row)
    return attempt.with_assignments(mine), _crew(carried)


def _evaluates(attempt: Attempt, row: Assignment) -> bool:
    return attempt.kind is AttemptKind.EVALUATE and row.key == attempt.key


def _open(crew: Crew) -> list[Assignment]:
    return [each for each in crew.assignments.values() if each.is_open]


def _crew(members: list[Assignment]) -> Crew:
    return NOBODY.with_assignments(members) if members else NOBODY
