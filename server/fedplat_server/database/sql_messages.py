"""The messages of secure aggregations in a SQL database: kept from their arrival to the end of their attempt.

Each message is a row of its own, which is written once: a step of an attempt whose messages have many megabytes writes
only its own messages.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import sqlalchemy
from sqlalchemy import Connection, or_, select

from fedplat.rounds import Attempt, AttemptKey
from fedplat.rounds.changes import MESSAGE_KINDS, SentMessage
from fedplat.rounds.protocols.secure_phases import MAX_BARRED
from fedplat.rounds.states import Reason
from fedplat_server.database import rows
from fedplat_server.database.tables import assignments, secure_messages

_C = secure_messages.c
_DELETE = secure_messages.delete().where(
    _C.job_id == sqlalchemy.bindparam("this_job"),
    _C.round == sqlalchemy.bindparam("this_round"),
    _C.number == sqlalchemy.bindparam("this_number"),
)


def write(connection: Connection, messages: Sequence[SentMessage], ended: Collection[AttemptKey]) -> None:
    """Add or replace messages, and remove those of attempts that end in the same transaction."""
    latest = {(each.id, each.kind): each.content for each in messages if each.id.attempt not in ended}
    values = [
        {
            "job_id": id_.attempt.job_id,
            "round": id_.attempt.round,
            "number": id_.attempt.number,
            "client_id": id_.client_id,
            "kind": kind,
            "content": content,
        }
        for (id_, kind), content in latest.items()
    ]
    if values:
        connection.execute(_upsert(connection.dialect.name), values)
    if ended:
        keys = [{"this_job": key.job_id, "this_round": key.round, "this_number": key.number} for key in sorted(ended)]
        connection.execute(_DELETE, keys)


def load(connection: Connection, key: AttemptKey) -> Mapping[str, Mapping[str, bytes]]:
    """Return the messages of the clients of an attempt: their contents by client and kind."""
    mine = (_C.job_id == key.job_id) & (_C.round == key.round) & (_C.number == key.number)
    query = select(_C.client_id, _C.kind, _C.content).where(mine, _C.kind.in_(MESSAGE_KINDS))
    found: dict[str, dict[str, bytes]] = {}
    for client_id, kind, content in connection.execute(query):
        found.setdefault(client_id, {})[kind] = content
    return found


@functools.cache
def _upsert(dialect: str) -> sqlalchemy.Executable:
    statement = rows.insert(dialect, secure_messages)
    keys = ["job_id", "round", "number", "client_id", "kind"]
    return statement.on_conflict_do_update(index_elements=keys, set_={"content": statement.excluded.content})


def list_barred(connection: Connection, job_id: str, last: Attempt | None) -> tuple[str, ...]:
    """Return the clients whose messages were invalid in an attempt of a job before its last one."""
    columns = assignments.c
    query = select(columns.client_id).where(columns.job_id == job_id, columns.reason == Reason.REJECTED_MESSAGE)
    if last is not None:
        query = query.where(or_(columns.round != last.key.round, columns.number != last.key.number))
    return tuple(sorted(connection.execute(query.distinct()).scalars())[:MAX_BARRED])
