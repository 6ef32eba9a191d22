"""The ended attempts of a SQL database, from which their traces are made.

All times are read from the history. Its index is by job and sequence, so a query for one attempt reads the rows of that
attempt, however long the history is.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, case, func, select

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.states import BUSY_STATES, OPEN_PHASES, AssignmentState, AttemptKind, AttemptPhase
from fedplat_server.database import rows, transactions
from fedplat_server.database.tables import assignments, history

_FAILED = (AssignmentState.FAILED, AssignmentState.REJECTED, AssignmentState.LATE)
_DONE = (AssignmentState.REPORTED, AssignmentState.MERGED)
_H = history.c
_ENDS_ATTEMPT = and_(_H.entity == "attempt", _H.to_state.in_(set(AttemptPhase) - OPEN_PHASES))
_ENDS_ASSIGNMENT = and_(
    _H.entity == "assignment", _H.from_state.in_(BUSY_STATES), _H.to_state.in_(set(AssignmentState) - BUSY_STATES)
)
_FAILED_FIRST = case((assignments.c.state.in_(_FAILED), 0), (assignments.c.state.in_(_DONE), 2), else_=1)


class _Window(NamedTuple):
    """The history of a job after the end of an attempt, up to and including the end of the next one."""

    job_id: str
    after: int
    last: int


class TraceStore:
    """The attempts that have ended, as rows of the history tell, whose numbers grow over all jobs."""

    def __init__(self, database: transactions.Database) -> None:
        self._database = database

    async def find_last_sequence(self) -> int:
        """Return the number of the last history row; 0 in an empty history."""
        found = await self._database.fetch(select(_H.sequence).order_by(_H.sequence.desc()).limit(1))
        return found[0].sequence if found else 0

    async def list_ended_attempts(
        self, after_sequence: int, *, since_unix_s: float = 0.0, limit: int = 10, max_assignments: int = 100
    ) -> list[EndedAttempt]:
        """Return the first `limit` attempts that ended after a history row and since a time, in the order of their end.

        Attempts whose history was removed are left out.
        """
        ends = (
            select(*[_H[name] for name in ("sequence", "job_id", "round", "attempt", "kind")])
            .where(_H.sequence > after_sequence, _ENDS_ATTEMPT, _H.unix_s >= since_unix_s)
            .order_by(_H.sequence)
            .limit(limit)
        )

        def transaction(connection: Connection) -> list[EndedAttempt]:
            return [_read_attempt(connection, row, max_assignments) for row in connection.execute(ends).all()]

        return await self._database.read(transaction)


def _read_attempt(connection: Connection, end: rows.Row, max_assignments: int) -> EndedAttempt:
    before = (
        select(_H.sequence)
        .where(_H.job_id == end.job_id, _H.sequence < end.sequence, _ENDS_ATTEMPT)
        .order_by(_H.sequence.desc())
        .limit(1)
    )
    window = _Window(end.job_id, connection.execute(before).scalar() or 0, end.sequence)
    key = AttemptKey(end.job_id, end.round, end.attempt)
    return EndedAttempt(
        sequence=end.sequence,
        key=key,
        kind=AttemptKind(end.kind or AttemptKind.TRAIN),  # rows of the first release have no kind
        phases=_read_phases(connection, window, key),
        assignments=_read_assignments(connection, window, max_assignments),
        counts=_count_assignments(connection, key),
    )


def _read_phases(connection: Connection, window: _Window, key: AttemptKey) -> tuple[PhaseStart, ...]:
    query = (
        select(_H.to_state, _H.unix_s)
        .where(_in_window(window), _H.entity == "attempt", _H.round == key.round, _H.attempt == key.number)
        .order_by(_H.sequence)
    )
    return tuple(
        PhaseStart(rows.read_attempt_phase(row.to_state, has_ended=False), row.unix_s)
        for row in connection.execute(query)
    )


def _read_assignments(connection: Connection, window: _Window, limit: int) -> tuple[EndedAssignment, ...]:
    mine = assignments.c
    same = and_(
        mine.job_id == _H.job_id, mine.round == _H.round, mine.number == _H.attempt, mine.client_id == _H.client_id
    )
    columns = [_H[name] for name in ("round", "attempt", "client_id", "unix_s")]
    columns += [mine[name] for name in ("state", "reason", "base_version", "update_bytes", "assigned_unix_s")]
    query = (
        select(*columns)
        .join(assignments, same)
        .where(_in_window(window), _ENDS_ASSIGNMENT)
        .order_by(_FAILED_FIRST, _H.sequence)
        .limit(limit)
    )
    return tuple(_to_assignment(window.job_id, row) for row in connection.execute(query))


def _to_assignment(job_id: str, row: rows.Row) -> EndedAssignment:
    return EndedAssignment(
        id=AssignmentId(AttemptKey(job_id, row.round, row.attempt), row.client_id),
        state=rows.read_assignment_state(row.state, has_ended=True),
        reason=row.reason or "",
        base_version=row.base_version,
        update_bytes=row.update_bytes,
        assigned_unix_s=row.assigned_unix_s,
        ended_unix_s=row.unix_s,
    )


def _count_assignments(connection: Connection, key: AttemptKey) -> Mapping[AssignmentState, int]:
    mine = assignments.c
    query = (
        select(mine.state, func.count().label("total"))
        .where(mine.job_id == key.job_id, mine.round == key.round, mine.number == key.number)
        .group_by(mine.state)
    )
    counts = Counter[AssignmentState]()
    for row in connection.execute(query):
        counts[rows.read_assignment_state(row.state, has_ended=True)] += row.total
    return counts


def _in_window(window: _Window) -> ColumnElement[bool]:
    return and_(_H.job_id == window.job_id, _H.sequence > window.after, _H.sequence <= window.last)


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
