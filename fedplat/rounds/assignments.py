"""Transitions of single assignments. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from fedplat.rounds.commands import Abort, Command
from fedplat.rounds.records import Assignment, JobState
from fedplat.rounds.states import ASSIGNMENT_TRANSITIONS, AssignmentState, Reason, require
from fedplat.texts import shorten


def put(job: JobState, assignment: Assignment) -> JobState:
    """Replace one assignment of the job, in its attempt or among those carried over."""
    if job.carried_over.find(assignment.key, assignment.client_id) is not None:
        return structs.replace(job, carried_over=job.carried_over.with_assignments([assignment]))
    assert job.attempt is not None
    return structs.replace(job, attempt=job.attempt.with_assignments([assignment]))


def end(assignment: Assignment, state: AssignmentState, reason: Reason, text: str = "") -> Assignment:
    """End an assignment for a reason. `text` may quote a client; it is shortened before it is stored."""
    ended = require(ASSIGNMENT_TRANSITIONS, assignment.state, state)
    return structs.replace(assignment, state=ended, reason=reason, text=shorten(text))


def abort_commands(ended: Iterable[Assignment]) -> tuple[Command, ...]:
    """Return the commands that stop the clients of ended assignments."""
    return tuple(Abort(each.key, each.client_id, each.reason) for each in ended if each.reason is not None)
