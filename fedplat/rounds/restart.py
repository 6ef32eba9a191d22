"""How an attempt resumes after its server was killed. Pure functions.

The store returns the attempt as last saved, with its deadlines on the new clock. The accepted updates are in the spool
(`durability = "spool"`): all of them are folded again in the order of acceptance, so that the result is the same bit
for bit. With `durability = "memory"` they are lost, and so is the attempt; but an attempt that fills a buffer continues
with the clients that work for it. A secure aggregation continues with the same roster and the same survivors; its steps
get their whole time again, because clients have to reconnect. A warm start has no updates: it continues from its own
checkpoints.
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import structs

from fedplat.rounds import attempts, closing, commands, events, operators, states
from fedplat.rounds.commands import Command, Commit, Context, Transition
from fedplat.rounds.protocols.base import protocol_of, training_of
from fedplat.rounds.records import Assignment, AssignmentSet, Attempt, JobState

_Set = TypeVar("_Set", bound=AssignmentSet)


def on_restart(job: JobState, event: events.ServerRestarted, context: Context) -> Transition:
    """Resume the open attempt, or abandon it; a back-off ends early. A job whose plugins are not the same is paused.

    A job that does not change keeps its revision, so that it is not written: servers keep thousands of ended jobs.
    """
    missing = operators.describe_missing(job, event.plugins, event.problem)
    if text := missing or operators.describe_changed(job, event.plugins):
        return operators.pause_for_plugins(job, text, context)
    fresh = structs.replace(job, resume_at=None) if job.resume_at is not None else job
    fresh = training_of(job).membership.expect(fresh, context)
    attempt = job.open_attempt
    if attempt is None:
        return Transition(fresh)
    return protocol_of(job, attempt.kind).resume(fresh, attempt, context)


def resume(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Continue an attempt with the deadlines of its clients, at most."""
    return refold(bound_deadlines(job, context.now), attempt, context)


def refold(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Fold the accepted updates again, and continue; without a spool the attempt is lost."""
    if job.spec.durability == "memory":
        return lose(job, context)
    commands = closing.fold_commands(attempt, attempt.reported)
    if attempt.phase is states.AttemptPhase.COMMITTING and protocol_of(job, attempt.kind).folds:
        commands += (Commit(attempt.key, attempt.base_version, attempt.num_reported),)
    return go_on(job, commands, context)


def lose(job: JobState, context: Context) -> Transition:
    """Abandon an attempt whose updates were in memory."""
    text = "the server was restarted"
    return Transition(*closing.abandon(forget_updates(job), states.Reason.ATTEMPT_ABANDONED, text, context))


def forget_updates(job: JobState) -> JobState:
    """Drop the accepted updates, which a job with `durability = "memory"` loses in a crash. Busy clients continue."""

    def drop(group: _Set) -> _Set:
        return group.with_assignments(
            [
                commands.end_assignment(each, states.AssignmentState.DROPPED, states.Reason.ATTEMPT_ABANDONED)
                for each in group.reported
            ]
        )

    attempt, carried = job.attempt, job.carried_over
    return structs.replace(
        job,
        attempt=drop(attempt) if attempt is not None and attempt.num_reported else attempt,
        carried_over=drop(carried) if carried.num_reported else carried,
    )


def go_on(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    """Wait for the other reports in the remaining time, or again for clients; end what is overdue."""
    attempt = job.open_attempt
    assert attempt is not None
    closes_at = protocol_of(job, attempt.kind).closes_at(job, context.now)
    if attempt.phase is states.AttemptPhase.COLLECTING and closes_at is not None:
        # The attempt gets its full time again, whichever clients were drawn: the time that was left is stored only with
        # assignments, and so depends on the sample.
        attempt = structs.replace(attempt, closes_at=closes_at)
        job = structs.replace(job, attempt=attempt)
    late = closing.drop_late(closing.await_clients(job, context) if attempts.selects(job) else job, context)
    return structs.replace(late, commands=commands + late.commands)


def bound_deadlines(job: JobState, now: float) -> JobState:
    """Bound the deadlines: if the wall clock was set back meanwhile, no client gets more time."""
    groups: dict[str, Any] = {}
    for name, group in (("attempt", job.attempt), ("carried_over", job.carried_over)):
        busy = group.busy if group is not None else []
        moved = [after for each in busy if (after := _bound_deadline(job, each, now)) != each]
        if group is not None and moved:
            groups[name] = group.with_assignments(moved)
    return structs.replace(job, **groups) if groups else job


def _bound_deadline(job: JobState, assignment: Assignment, now: float) -> Assignment:
    if assignment.state is states.AssignmentState.UPLOADING:
        longest = job.spec.deadlines.upload_s
    else:
        longest = protocol_of(job, assignment.kind).longest_s(job, assignment)
    return structs.replace(
        assignment, assigned_at=min(assignment.assigned_at, now), deadline_at=min(assignment.deadline_at, now + longest)
    )
