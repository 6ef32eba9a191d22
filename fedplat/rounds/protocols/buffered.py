"""A job with a buffer (`[mode] kind = "buffered"`): FedBuff.

Nguyen et al. 2022, arXiv 2106.06639, Algorithm 1. An attempt to train fills one buffer. While it collects, the job
draws clients until `concurrency` are at work, and each begins with the latest version. `goal` reports close the
attempt. Assignments that are busy then are *carried over*: the job keeps them during the commit and a federated
evaluation, until the next attempt takes them over (`take_over`). A report that arrives in between waits, and is folded
in the next attempt. An update's staleness is the number of versions committed after its base version when an attempt
accepts it. It stays fixed from then on, because the next version is made from the update.
"""

from __future__ import annotations

from msgspec import structs

from fedplat.job import JobSpec
from fedplat.rounds import attempts, closing, commands, events, interventions, selection
from fedplat.rounds.commands import Command, Context, Transition
from fedplat.rounds.demand import Demand
from fedplat.rounds.protocols.base import Ending, RoundProtocol, register
from fedplat.rounds.records import Assignment, AssignmentSet, Attempt, JobState, make_assignment_set
from fedplat.rounds.states import ATTEMPT_TRANSITIONS, AssignmentState, AttemptPhase, Reason, require
from fedplat.texts import format_count


def advance(job: JobState, attempt: Attempt, context: Context) -> Transition | None:
    """Take over what was carried over, and close at once if enough reports were waiting."""
    if attempt.phase is AttemptPhase.SELECTING and has_carried_over(job):
        return take_over(job, context)
    if attempt.phase is AttemptPhase.COLLECTING and attempt.num_reported >= attempt.goal:
        return closing.close(job, (), context)
    return None


def demand(job: JobState, attempt: Attempt, min_eligible: int = 1) -> Demand | None:
    """Demand clients while it collects, and take them in the order of their arrival."""
    free = attempt.target - attempt.num_busy
    if attempt.phase not in (AttemptPhase.SELECTING, AttemptPhase.COLLECTING) or free <= 0:
        return None
    return selection.training_demand(job, attempt, free, min_eligible)


def on_drawn(job: JobState, attempt: Attempt, event: events.CandidatesDrawn, context: Context) -> Transition:
    """Assign the drawn clients; if none was available in time, close with the reports, or fail."""
    if not event.client_ids:
        return closing.close_without_clients(job, context)
    return attempts.assign(job, attempt, event.client_ids, context)


def describe_cohort(spec: JobSpec) -> str:
    """Return how many clients are at work, and how many reports make a version."""
    reports = format_count(spec.selection.goal, "report")
    return f"{format_count(spec.num_wanted, 'client')} at work and {reports} needed in each"


def judge_end(job: JobState, attempt: Attempt, context: Context) -> Ending:
    """Close when the buffer is full. A client that fails is replaced by another."""
    if attempt.num_reported >= attempt.goal:
        return Ending.CLOSE
    return Ending.WAIT if attempt.num_busy else Ending.WAIT_FOR_CLIENTS


def release_busy(job: JobState, attempt: Attempt) -> tuple[JobState, Attempt, tuple[Command, ...]]:
    """Carry busy clients over into the next round; after the last they are surplus."""
    if attempt.key.round < job.spec.rounds:
        return *carry_over(job, attempt), ()
    job, commands = closing.drop_carried_over(job, Reason.SURPLUS)
    job, attempt, more = closing.release_surplus(job, attempt)
    return job, attempt, commands + more


def resume(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Continue with the busy clients although the updates in memory are lost, unless the attempt commits."""
    if job.spec.durability != "memory" or attempt.phase is AttemptPhase.COMMITTING:
        return interventions.resume_attempt(job, attempt, context)
    job = interventions.forget_updates(interventions.bound_deadlines(job, context.now))
    return interventions.go_on(job, (), context)


def has_carried_over(job: JobState) -> bool:
    """Return whether the job has open assignments that the next attempt must take over."""
    return job.carried_over.num_busy > 0 or job.carried_over.num_reported > 0


def carry_over(job: JobState, attempt: Attempt) -> tuple[JobState, Attempt]:
    """Move the busy assignments of a closing attempt to those that the job carries over."""
    staying = [each for each in attempt.assignments.values() if not each.is_busy]
    carried = make_assignment_set([*_open(job.carried_over), *attempt.busy])
    bare = structs.replace(attempt, assignments={}, counts={}, next_deadline=None, last_report=0)
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
        closing.accept_report(job, attempt, each, number) for number, each in enumerate(fresh[: attempt.goal], 1)
    ]
    # More reports may wait than a buffer holds, and the rule divides by the buffer's size.
    waiting = [structs.replace(each, report_number=n) for n, each in enumerate(fresh[attempt.goal :], 1)]
    ended = [commands.end_assignment(each, AssignmentState.DROPPED, Reason.TOO_STALE) for each in stale]
    phase = require(ATTEMPT_TRANSITIONS, attempt.phase, AttemptPhase.COLLECTING)
    attempt = structs.replace(attempt, phase=phase).with_assignments([*ended, *accepted, *job.carried_over.busy])
    after = structs.replace(job, attempt=attempt, carried_over=make_assignment_set(waiting))
    after = after if attempt.num_busy else closing.await_clients(after, context)
    return Transition(after, closing.fold_commands(attempt, accepted))


def stop_stale(job: JobState) -> tuple[JobState, tuple[Command, ...]]:
    """Stop the clients whose base version is too old compared with the latest one."""
    mode = job.spec.buffered
    if mode is None or mode.max_staleness is None:
        return job, ()
    late = [
        commands.end_assignment(each, AssignmentState.LATE, Reason.TOO_STALE)
        for each in job.carried_over.busy
        if mode.is_too_stale(job.latest.version - each.base_version)
    ]
    if not late:
        return job, ()
    return structs.replace(job, carried_over=job.carried_over.with_assignments(late)), commands.abort_commands(late)


def _open(group: AssignmentSet) -> list[Assignment]:
    return [each for each in group.assignments.values() if each.is_open]


BUFFERED = register(
    RoundProtocol(
        name="buffered",
        carries_over=True,
        describe_cohort=describe_cohort,
        advance=advance,
        demand=demand,
        on_drawn=on_drawn,
        judge_end=judge_end,
        release_busy=release_busy,
        on_committed=lambda job, event: Transition(*stop_stale(job)),
        resume=resume,
    )
)
