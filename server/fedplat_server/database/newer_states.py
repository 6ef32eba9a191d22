"""States that a newer release has stored: each is read as the nearest one that this release knows.

While the daemons of a server are replaced one by one, an older one may take over in the middle of an attempt of a newer
one. It pauses such a job, as one with a job file that it cannot read (`fedplat/job/spec.py`), and runs the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, TypeVar

import sqlalchemy

from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase, Reason

Row = sqlalchemy.Row[Any]
_Name = TypeVar("_Name", bound=StrEnum)


def _find(enum: type[_Name], name: str, otherwise: _Name) -> _Name:
    return enum(name) if _is_known(enum, name) else otherwise


def _is_known(enum: type[StrEnum], name: str) -> bool:
    return name in enum.__members__


def attempt_kind(name: str) -> AttemptKind:
    """Return the kind of an attempt."""
    return _find(AttemptKind, name, AttemptKind.TRAIN)


def attempt_phase(name: str, *, has_ended: bool) -> AttemptPhase:
    """Return the phase of an attempt. An unknown one that is open becomes COLLECTING, which can be abandoned."""
    return _find(AttemptPhase, name, AttemptPhase.ABANDONED if has_ended else AttemptPhase.COLLECTING)


def assignment_state(name: str, *, has_ended: bool) -> AssignmentState:
    """Return the state of an assignment. An unknown one that is open becomes TRAINING, which can be dropped."""
    return _find(AssignmentState, name, AssignmentState.DROPPED if has_ended else AssignmentState.TRAINING)


def reason(name: str | None) -> Reason | None:
    """Return the reason of the end of an assignment; None if this release does not know it."""
    return Reason(name) if name is not None and _is_known(Reason, name) else None


def describe_unknown(attempt: Row, assignments: Iterable[Row]) -> str:
    """Return which state of a job's last attempt this release does not know; empty if it knows them all."""
    place = f"attempt {attempt.number} at round {attempt.round}"
    if not (_is_known(AttemptPhase, attempt.phase) and _is_known(AttemptKind, attempt.kind)):
        return f"{place} of the kind {attempt.kind} is {attempt.phase}"
    for each in assignments:
        if not _is_known(AssignmentState, each.state):
            return f"the assignment of client {each.client_id} in {place} is {each.state}"
    return ""
