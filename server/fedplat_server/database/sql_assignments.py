"""Lists, outcomes and counts of assignments, and the times of downloads, in a SQL database.

An assignment counts for the attempt that its update was folded into; until then, for the attempt that created it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import sqlalchemy
from sqlalchemy import ColumnElement, Connection, and_, case, cast, func, or_, select

from fedplat import rounds, texts
from fedplat.rounds import AttemptKey
from fedplat.rounds.states import OPEN_STATES, AssignmentState, Reason
from fedplat_server.database import rows, transactions
from fedplat_server.database.tables import NOT_DELETED, SAME_ATTEMPT, assignments, attempts, clients, jobs

MAX_EXAMPLE_BYTES = 300
"""Maximum size of a client's text that is shown as an example."""

_TIMES = ("assigned_unix_s", "deadline_unix_s", "downloaded_unix_s", "uploading_unix_s", "ended_unix_s")
_RECORD_DOWNLOAD = (
    assignments.update()
    .where(
        assignments.c.job_id == sqlalchemy.bindparam("this_job"),
        assignments.c.round == sqlalchemy.bindparam("this_round"),
        assignments.c.number == sqlalchemy.bindparam("this_number"),
        assignments.c.client_id == sqlalchemy.bindparam("this_client"),
        assignments.c.downloaded_unix_s.is_(None),
    )
    .values(downloaded_unix_s=sqlalchemy.bindparam("unix_s"))
)


class AssignmentStore:
    """Lists and outcomes of assignments, which `JobStore.save` writes."""

    def __init__(self, database: transactions.Database) -> None:
        self._database = database

    async def list_assignments(
        self, which: AssignmentFilter, *, after: AssignmentPlace | None = None, limit: int | None = None
    ) -> list[AssignmentRecord]:
        """Return the first `limit` assignments after a position, in the order of the filter."""
        query = select(assignments, attempts.c.kind).join(attempts, SAME_ATTEMPT).where(*_matches(which)).limit(limit)
        if after is not None:
            query = query.where(_is_later(which, after))
        return [_record(row) for row in await self._database.fetch(query.order_by(*_order(which)))]

    async def count_assignments(self, which: AssignmentFilter) -> int:
        """Return the number of assignments that satisfy a filter."""
        query = select(func.count()).select_from(assignments).where(*_matches(which))
        return (await self._database.fetch(query))[0][0]

    async def list_outcomes(self, key: rounds.AttemptKey) -> list[OutcomeCount]:
        """Return how assignments of an attempt ended without contributing, the most frequent first.

        Each has a text of one of the clients, of at most `MAX_EXAMPLE_BYTES`.
        """
        has_ended = assignments.c.state.not_in(sorted(OPEN_STATES | {AssignmentState.MERGED}))
        example = func.max(func.substr(cast(assignments.c.text, sqlalchemy.Text), 1, MAX_EXAMPLE_BYTES))
        group = (assignments.c.state, assignments.c.reason)
        count = func.count()
        query = select(*group, count.label("total"), example.label("example")).where(counts_for(key), has_ended)
        found = await self._database.fetch(query.group_by(*group).order_by(count.desc(), *group))
        return [
            OutcomeCount(
                rows.read_assignment_state(row.state, has_ended=True),
                rows.read_reason(row.reason),
                row.total,
                texts.shorten(row.example, MAX_EXAMPLE_BYTES),
            )
            for row in found
        ]

    async def count_labels(self, key: rounds.AttemptKey, limit: int) -> list[LabelledCount]:
        """Return the assignments of an attempt by the present labels of their clients and by state.

        At most `limit` combinations are returned.
        """
        labels = cast(clients.c.labels, sqlalchemy.Text)
        query = (
            select(labels.label("labels"), assignments.c.state, func.count().label("total"))
            .join(clients, clients.c.client_id == assignments.c.client_id)
            .where(counts_for(key))
            .group_by(labels, assignments.c.state)
            .limit(limit)
        )
        found = await self._database.fetch(query)
        return [
            LabelledCount(json.loads(row.labels), rows.read_assignment_state(row.state, has_ended=False), row.total)
            for row in found
        ]

    async def record_downloads(self, downloaded_unix_s: Mapping[rounds.AssignmentId, float]) -> None:
        """Store the times at which clients had the model of their assignment; the first time is kept."""
        # In the order of the keys, so that two writers cannot deadlock.
        values = [
            dict(zip(("this_job", "this_round", "this_number", "this_client"), (*key, client_id), strict=True))
            | {"unix_s": unix_s}
            for (key, client_id), unix_s in sorted(downloaded_unix_s.items())
        ]
        if values:
            await self._database.write(lambda connection: connection.execute(_RECORD_DOWNLOAD, values))


def _matches(which: AssignmentFilter) -> list[ColumnElement[bool]]:
    # With all job ids a client's assignments are found by an index that begins with the job.
    all_jobs = select(jobs.c.job_id).where(NOT_DELETED)
    conditions = [
        assignments.c.job_id == which.job_id if which.job_id else assignments.c.job_id.in_(all_jobs),
    ]
    for column, value in ((assignments.c.round, which.round), (assignments.c.number, which.number)):
        if value is not None:
            conditions.append(column == value)
    if which.client_id:
        conditions.append(assignments.c.client_id == which.client_id)
    if which.states:
        conditions.append(assignments.c.state.in_(sorted(which.states)))
    return conditions


def _order(which: AssignmentFilter) -> tuple[ColumnElement[Any], ...]:
    mine = assignments.c
    latest = (mine.round.desc(), mine.number.desc())
    return (mine.assigned_unix_s.desc(), mine.job_id, *latest) if which.is_by_time else (*latest, mine.client_id)


def _is_later(which: AssignmentFilter, place: AssignmentPlace) -> ColumnElement[bool]:
    """Return the condition for assignments after a position, in the order of the list."""
    mine = assignments.c
    before = or_(mine.round < place.round, and_(mine.round == place.round, mine.number < place.number))
    if which.is_by_time:
        same_job = and_(mine.job_id == place.job_id, before)
        same_time = and_(mine.assigned_unix_s == place.assigned_unix_s, or_(mine.job_id > place.job_id, same_job))
        return or_(mine.assigned_unix_s < place.assigned_unix_s, same_time)
    same_attempt = and_(mine.round == place.round, mine.number == place.number)
    # The first condition follows from the second, but lets the database begin at the right place of the index.
    return and_(mine.round <= place.round, or_(before, and_(same_attempt, mine.client_id > place.client_id)))


def _record(row: rows.Row) -> AssignmentRecord:
    return AssignmentRecord(rows.assignment(row), *(getattr(row, name) for name in _TIMES))


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

    assignment: rounds.Assignment
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


_OWN = (assignments.c.job_id, assignments.c.round, assignments.c.number)
_INTO = (assignments.c.job_id, assignments.c.into_round, assignments.c.into_number)
_IS_INTO = assignments.c.into_round.is_not(None)

# A report (or keys, in a secure aggregation) is only possible after the training, and the training only with the model.
TRAINED = or_(
    assignments.c.uploading_unix_s.is_not(None),
    assignments.c.took_s.is_not(None),
    assignments.c.state == AssignmentState.REJECTED,
)
"""Condition for assignments whose client completed the training."""
DOWNLOADED = or_(assignments.c.downloaded_unix_s.is_not(None), TRAINED)
"""Condition for assignments whose client received the model."""


def counts_for(key: AttemptKey) -> ColumnElement[bool]:
    """Return the condition for the assignments that count for an attempt."""
    own = and_(*(column == part for column, part in zip(_OWN, key, strict=True)))
    into = and_(*(column == part for column, part in zip(_INTO, key, strict=True)))
    return (own & assignments.c.into_round.is_(None)) | (into & _IS_INTO)


def tally(connection: Connection, keys: Collection[AttemptKey]) -> dict[AttemptKey, list[rows.Row]]:
    """Return rows with the counts by state of each attempt, with bytes, norms, staleness and steps of the clients."""
    found: dict[AttemptKey, list[rows.Row]] = {}
    values = transactions.json_key_values(keys)
    for is_into in (False, True):
        for row in connection.execute(_tally(connection.dialect.name, is_into=is_into), values) if keys else ():
            found.setdefault(AttemptKey(row.job_id, row.round, row.number), []).append(row)
    return found


@functools.cache  # to build it takes longer than to run it
def _tally(dialect: str, *, is_into: bool) -> sqlalchemy.Executable:
    """Return the query for the assignments that attempts created, or for those that they took over."""
    wanted, place = transactions.json_attempt_keys(dialect), _INTO if is_into else _OWN
    named = (wanted.c.job_id, wanted.c.round, wanted.c.number)
    theirs = and_(*(column == name for column, name in zip(place, named, strict=True)))
    query = select(
        *named,
        assignments.c.state,
        func.count().label("total"),
        func.sum(assignments.c.update_bytes).label("update_bytes"),
        func.max(assignments.c.norm).label("largest_norm"),
        func.sum(assignments.c.staleness).label("staleness"),
        func.count(assignments.c.staleness).label("num_stale"),
        func.max(assignments.c.staleness).label("max_staleness"),
        func.sum(case((DOWNLOADED, 1), else_=0)).label("num_downloaded"),
        func.sum(case((TRAINED, 1), else_=0)).label("num_trained"),
    )
    joined = query.select_from(wanted.join(assignments, theirs))
    counted = joined.where(_IS_INTO if is_into else assignments.c.into_round.is_(None))
    return counted.group_by(*named, assignments.c.state)
