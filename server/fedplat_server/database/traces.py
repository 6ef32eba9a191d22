"""Stored records of an ended attempt, from which its trace is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.states import AssignmentState, AttemptKind, AttemptPhase


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseStart:
    """The time at which an attempt entered a phase."""

    phase: AttemptPhase
    unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class EndedAssignment:
    """An assignment that its client has finished or left, at `ended_unix_s`; `state` is the present one."""

    id: AssignmentId
    state: AssignmentState
    reason: str
    base_version: int
    update_bytes: int
    assigned_unix_s: float
    ended_unix_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class EndedAttempt:
    """An attempt that has ended.

    `sequence` is that of the history row of its end, `phases` has all its phases in order, the last one included.
    `assignments` are those that clients finished or left since the previous attempt of the job ended; in a job with a
    buffer some were made in earlier attempts. There is a limit: those that failed come first. `counts` has the numbers
    of all assignments that were made in the attempt.
    """

    sequence: int
    key: AttemptKey
    kind: AttemptKind
    phases: tuple[PhaseStart, ...]
    assignments: tuple[EndedAssignment, ...]
    counts: Mapping[AssignmentState, int]
