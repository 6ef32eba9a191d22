"""Records of assignments as they are listed, and of their outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

from fedplat.rounds import Assignment
from fedplat.rounds.states import AssignmentState, Reason


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentFilter:
    """The assignments of a list: those that satisfy all conditions; a job or a client is required.

    `round` and `number` are those of the attempt that created them (None: any). The latest attempt is first, and an
    attempt's assignments are sorted by client. Those of one client in several jobs are sorted by time, the latest
    first.
    """

    job_id: str = ""
    round: int | None = None
    number: int | None = None
    client_id: str = ""
    states: Collection[AssignmentState] = ()

    @property
    def is_by_time(self) -> bool:
        """True if the assignments are sorted by time."""
        return not self.job_id


class AssignmentPlace(NamedTuple):
    """The position of an assignment in any list."""

    assigned_unix_s: float
    job_id: str
    round: int
    number: int
    client_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class AssignmentRecord:
    """An assignment with the times of its steps (None: not yet, or not known). Its own times are zero."""

    assignment: Assignment
    assigned_unix_s: float
    deadline_unix_s: float
    downloaded_unix_s: float | None
    uploading_unix_s: float | None
    ended_unix_s: float | None

    @property
    def place(self) -> AssignmentPlace:
        """Its position in a list."""
        return AssignmentPlace(self.assigned_unix_s, *self.assignment.key, self.assignment.client_id)


@dataclasses.dataclass(frozen=True, slots=True)
class OutcomeCount:
    """Assignments of an attempt that ended with one state and reason, and what one of the clients wrote."""

    state: AssignmentState
    reason: Reason | None
    count: int
    example: str


@dataclasses.dataclass(frozen=True, slots=True)
class LabelledCount:
    """Assignments of an attempt in one state, whose clients have equal labels."""

    labels: Mapping[str, str]
    state: AssignmentState
    count: int
