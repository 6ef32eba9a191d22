"""How an attempt goes on after its server was killed. Pure functions.

The store has given the attempt back as it was when it was last saved, with its deadlines on the new clock. The
updates that were accepted lie in the spool (`durability = "spool"`): they are folded again from the first one on, in
the order in which they were accepted, so that the result is the same bit for bit. With `durability = "memory"` they
are gone, and the attempt with them.
"""

from __future__ import annotations

import dataclasses

from fedplat.rounds import closing
from fedplat.rounds.commands import Command, Commit, Fold
from fedplat.rounds.events import ServerRestarted
from fedplat.rounds.records import Assignment, Attempt, JobState
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, Reason
from fedplat.rounds.transition import Context, Transition


def on_restart(job: JobState, _: ServerRestarted, context: Context) -> Transition:
    """Lets the open attempt go on, or abandons it; a back-off is cut short.

    A job to which nothing happens keeps its revision, so that it is not written: servers keep thousands of old ones.
    """
    fresh = dataclasses.replace(job, resume_at=None) if job.resume_at is not None else job
    attempt = job.open_attempt
    if attempt is None:
        return Transition(fresh)
    if job.spec.durability == "memory":
        return Transition(*closing.abandon(fresh, Reason.ATTEMPT_ABANDONED, "the server was restarted", context))
    if attempt.phase is AttemptPhase.SELECTING:
        selecting = dataclasses.replace(attempt, selection_ends_at=context.now + job.spec.deadlines.selection_s)
        return Transition(dataclasses.replace(fresh, attempt=selecting))
    commands = _folds(attempt)
    if attempt.phase is AttemptPhase.COMMITTING:
        if attempt.kind is AttemptKind.TRAIN:
            commands += (Commit(attempt.key, attempt.base_version, attempt.num_reported),)
        return Transition(fresh, commands)
    return _collect(fresh, attempt, commands, context)


def _folds(attempt: Attempt) -> tuple[Command, ...]:
    if attempt.kind is not AttemptKind.TRAIN:
        return ()
    return tuple(Fold(attempt.key, each.client_id, each.digest, each.contribution) for each in attempt.reported)


def _collect(job: JobState, attempt: Attempt, folds: tuple[Command, ...], context: Context) -> Transition:
    """Waits for the others in the time that is left; whose time is over has had it."""
    busy = [each for each in attempt.assignments.values() if each.is_busy]
    moved = [after for each in busy if (after := _in_bounds(job, attempt, each, context.now)) != each]
    late = closing.drop_late(dataclasses.replace(job, attempt=attempt.with_assignments(moved)), context)
    return dataclasses.replace(late, commands=folds + late.commands)


def _in_bounds(job: JobState, attempt: Attempt, assignment: Assignment, now: float) -> Assignment:
    """The assignment with moments that can be true: a wall clock that was set back meanwhile gives nobody more time."""
    evaluation = job.spec.evaluation.clients
    if assignment.state is AssignmentState.UPLOADING:
        longest = job.spec.deadlines.upload_s
    elif attempt.kind is AttemptKind.EVALUATE and evaluation is not None:
        longest = evaluation.timeout_s
    else:  # an adaptive deadline gave less
        longest = min(job.spec.deadlines.training_s, assignment.deadline_at - assignment.assigned_at)
    return dataclasses.replace(
        assignment,
        assigned_at=min(assignment.assigned_at, now),
        deadline_at=min(assignment.deadline_at, now + longest),
    )
