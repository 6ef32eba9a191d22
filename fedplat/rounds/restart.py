"""How an attempt goes on after its server was killed. Pure functions.

The store has given the attempt back as it was when it was last saved, with its deadlines on the new clock. The
updates that were accepted lie in the spool (`durability = "spool"`): they are folded again from the first one on, in
the order in which they were accepted, so that the result is the same bit for bit. With `durability = "memory"` they
are gone, and the attempt with them; but an attempt that fills a buffer goes on with the clients that work for it. A
warm start has no updates: it goes on from its own checkpoints.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from fedplat.rounds import buffered, closing, privacy_rules, reporting, warm_start
from fedplat.rounds.commands import Command, Commit
from fedplat.rounds.events import ServerRestarted
from fedplat.rounds.records import Assignment, Attempt, JobState
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, Reason
from fedplat.rounds.transition import Context, Transition


def on_restart(job: JobState, _: ServerRestarted, context: Context) -> Transition:
    """Lets the open attempt go on, or abandons it; a back-off is cut short.

    A job to which nothing happens keeps its revision, so that it is not written: servers keep thousands of old ones.
    """
    fresh = structs.replace(job, resume_at=None) if job.resume_at is not None else job
    attempt = job.open_attempt
    if attempt is None:
        return Transition(fresh)
    if warm_start.is_warm_start(attempt):
        return Transition(fresh, (warm_start.make_command(attempt),))
    fresh = _in_bounds(fresh, context.now)
    if job.spec.durability == "memory":
        return _without_updates(fresh, attempt, context)
    commands = reporting.fold_commands(attempt, attempt.reported)
    if attempt.phase is AttemptPhase.COMMITTING and attempt.kind is AttemptKind.TRAIN:
        commands += (Commit(attempt.key, attempt.base_version, attempt.num_reported),)
    return _go_on(fresh, commands, context)


def _without_updates(job: JobState, attempt: Attempt, context: Context) -> Transition:
    """Clients at work for a buffer, or carried, go on; all else that the attempt has is lost."""
    left = buffered.forget_updates(job) if job.spec.buffered is not None else job
    if reporting.fills_buffer(job, attempt) and attempt.phase is not AttemptPhase.COMMITTING:
        return _go_on(left, (), context)
    return Transition(*closing.abandon(left, Reason.ATTEMPT_ABANDONED, "the server was restarted", context))


def _go_on(job: JobState, commands: tuple[Command, ...], context: Context) -> Transition:
    """Waits for the others in the time that is left, or for clients anew; whose time is over has had it."""
    attempt = job.open_attempt
    assert attempt is not None
    closes_at = privacy_rules.closes_at(job, attempt, context.now)
    if attempt.phase is AttemptPhase.COLLECTING and closes_at is not None:
        # It has all its time anew, whichever clients were drawn: what was left is known only of attempts that drew
        # clients.
        attempt = structs.replace(attempt, closes_at=closes_at)
        job = structs.replace(job, attempt=attempt)
    late = closing.drop_late(reporting.await_clients(job, context) if attempt.awaits_clients else job, context)
    return structs.replace(late, commands=commands + late.commands)


def _in_bounds(job: JobState, now: float) -> JobState:
    """Bound the deadlines: a wall clock that was set back meanwhile gives no client more time."""
    crews: dict[str, Any] = {}
    for name, crew in (("attempt", job.attempt), ("carried", job.carried_over)):
        busy = crew.busy if crew is not None else []
        moved = [after for each in busy if (after := _bound_deadline(job, each, now)) != each]
        if crew is not None and moved:
            crews[name] = crew.with_assignments(moved)
    return structs.replace(job, **crews) if crews else job


def _bound_deadline(job: JobState, assignment: Assignment, now: float) -> Assignment:
    evaluation = job.spec.evaluation.clients
    if assignment.state is AssignmentState.UPLOADING:
        longest = job.spec.deadlines.upload_s
    elif assignment.kind is AttemptKind.EVALUATE and evaluation is not None:
        longest = evaluation.timeout_s
    else:  # an adaptive deadline gave less
        longest = min(job.spec.deadlines.training_s, assignment.deadline_at - assignment.assigned_at)
    return structs.replace(
        assignment,
        assigned_at=min(assignment.assigned_at, now),
        deadline_at=min(assignment.deadline_at, now + longest),
    )
