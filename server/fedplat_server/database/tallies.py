"""Counts of the assignments of attempts, by state, in a SQL database.

An assignment counts for the attempt that its update was folded into; until then, for the attempt that created it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import sqlalchemy
from sqlalchemy import ColumnElement, Connection, and_, case, func, or_, select

from fedplat.rounds import AttemptKey
from fedplat.rounds.states import AssignmentState
from fedplat_server.database import json_lists, rows
from fedplat_server.database.tables import assignments

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
    values = json_lists.key_values(keys)
    for is_into in (False, True):
        for row in connection.execute(_tally(connection.dialect.name, is_into=is_into), values) if keys else ():
            found.setdefault(AttemptKey(row.job_id, row.round, row.number), []).append(row)
    return found


@functools.cache  # to build it takes longer than to run it
def _tally(dialect: str, *, is_into: bool) -> sqlalchemy.Executable:
    """Return the query for the assignments that attempts created, or for those that they took over."""
    wanted, place = json_lists.attempt_keys(dialect), _INTO if is_into else _OWN
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
