"""Operators, and the audit log of what they did, in a SQL database."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, func, select

from fedplat_server.database import rows, sql_events, transactions
from fedplat_server.database.tables import audit_head, audit_log, operators
from fedplat_server.errors import OperatorError
from fedplat_server.records import audit
from fedplat_server.records.audit import ALL_ROWS, AuditAction, AuditEntry, AuditFilter, AuditHead, AuditRow
from fedplat_server.records.events import EventEntry, EventType
from fedplat_server.records.operators import OperatorRecord, Role, require_another_admin


def append_entries(connection: Connection, entries: Sequence[AuditEntry], unix_s: float) -> None:
    """Append audit entries in the transaction of a change.

    Must be the last step of the transaction. The row of the head stays locked until the end, so that the chain cannot
    fork, and no deadlock is possible: the holder of this lock requests no further lock.
    """
    if not entries:
        return
    row = connection.execute(select(audit_head).with_for_update()).one()
    appended, head = audit.chain(entries, unix_s, AuditHead(row.num_rows, row.hash))
    connection.execute(audit_log.insert(), [dataclasses.asdict(row) for row in appended])
    connection.execute(audit_head.update().values(dataclasses.asdict(head)))
    transactions.appended_rows(connection).audit_actions += [entry.action.value for entry in entries]


class AuditStore:
    """The audit log. Its rows are never changed or removed."""

    def __init__(self, database: transactions.Database, clock: transactions.Clock) -> None:
        self._database = database
        self._clock = clock

    async def append(self, entries: Sequence[AuditEntry]) -> None:
        """Append entries, all or none, as consecutive rows of the chain."""
        await self._database.write(lambda connection: append_entries(connection, entries, self._clock()))

    async def list_rows(
        self, after_sequence: int = 0, limit: int = 1000, which: AuditFilter = ALL_ROWS
    ) -> list[AuditRow]:
        """Return rows after a sequence number; with `newest_first`, those before it, or the last ones if it is 0."""
        query = select(audit_log).where(*_matches(which)).limit(limit)
        if which.newest_first:
            query = query.order_by(audit_log.c.sequence.desc())
            query = query.where(audit_log.c.sequence < after_sequence) if after_sequence else query
        else:
            query = query.order_by(audit_log.c.sequence).where(audit_log.c.sequence > after_sequence)
        return [rows.to_record(row, AuditRow) for row in await self._database.fetch(query)]

    async def count_rows(self, after_sequence: int = 0, which: AuditFilter = ALL_ROWS) -> int:
        """Return the number of rows after a sequence number that satisfy a filter."""
        if which.is_total:  # the rows are numbered without gaps
            return max((await self.read_head()).num_rows - after_sequence, 0)
        later = audit_log.c.sequence > after_sequence
        query = select(func.count()).select_from(audit_log).where(later, *_matches(which))
        return (await self._database.fetch(query))[0][0]

    async def read_head(self) -> AuditHead:
        """Return the stored head of the log."""
        (row,) = await self._database.fetch(select(audit_head))
        return AuditHead(row.num_rows, row.hash)


async def list_creators(log: AuditStore) -> dict[str, str]:
    """Return the names of the operators that have made jobs, by the ids of these."""
    which, creators, last = AuditFilter(action=AuditAction.JOB_CREATED), dict[str, str](), 0
    while page := await log.list_rows(last, which=which):
        creators |= {row.subject: row.actor for row in page}
        last = page[-1].sequence
    return creators


def _matches(which: AuditFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if which.actor:
        conditions.append(audit_log.c.actor == which.actor)
    if which.action:
        conditions.append(audit_log.c.action == which.action)
    if which.subject:
        conditions.append(audit_log.c.subject == which.subject)
    if which.since_unix_s:
        conditions.append(audit_log.c.unix_s >= which.since_unix_s)
    return conditions


class OperatorStore:
    """The operators that may use the services of `admin.proto`."""

    def __init__(self, database: transactions.Database, clock: transactions.Clock) -> None:
        self._database = database
        self._clock = clock

    async def add_operator(self, operator: OperatorRecord, token_hash: bytes, audit: Sequence[AuditEntry] = ()) -> None:
        """Add an operator. Raises `OperatorError` if the name is taken."""
        values = {**dataclasses.asdict(operator), "token_hash": token_hash}
        insert = rows.insert(self._database.dialect, operators).values(values)
        insert = insert.on_conflict_do_nothing(index_elements=["name"])
        text = f"operator {operator.name} was added with the role {operator.role}"
        added = EventEntry(EventType.OPERATOR_ADDED, subject=operator.name, text=text)

        def transaction(connection: Connection) -> None:
            if connection.execute(insert).rowcount != 1:
                raise OperatorError(f"operator {operator.name} exists already; remove it or choose another name")
            sql_events.append_events(connection, [added], self._clock())
            append_entries(connection, audit, self._clock())

        await self._database.write(transaction)

    async def remove_operator(
        self, name: str, audit: Sequence[AuditEntry] = (), *, keep_an_admin: bool = False
    ) -> None:
        """Remove an operator. Raises `OperatorError` if the name is unknown.

        With `keep_an_admin`, raises `LastAdminError` if it is the only one with the role admin and a valid token, also
        if others are removed concurrently.
        """
        removed = EventEntry(EventType.OPERATOR_REMOVED, subject=name, text=f"operator {name} was removed")
        # Locks the rows in one order: if two admins remove each other, the second waits here and finds one admin less.
        admins = select(operators).where(operators.c.role == Role.ADMIN).order_by(operators.c.name).with_for_update()

        def transaction(connection: Connection) -> None:
            if keep_an_admin:
                found = [_operator(row) for row in connection.execute(admins)]
                require_another_admin(found, name, self._clock())
            if connection.execute(operators.delete().where(operators.c.name == name)).rowcount != 1:
                raise OperatorError(f"there is no operator {name}")
            sql_events.append_events(connection, [removed], self._clock())
            append_entries(connection, audit, self._clock())

        await self._database.write(transaction)

    async def find_operator(self, token_hash: bytes) -> OperatorRecord | None:
        """Return the operator with this token, valid or expired."""
        found = await self._database.fetch(select(operators).where(operators.c.token_hash == token_hash))
        return _operator(found[0]) if found else None

    async def list_operators(self, *, after: str = "", limit: int | None = None) -> list[OperatorRecord]:
        """Return the first `limit` operators after a name, by name."""
        # In the order of code points, as in SQLite and Python, whatever the collation of the database is.
        name = operators.c.name.collate("C") if self._database.dialect == "postgresql" else operators.c.name
        later = select(operators).where(name > after).order_by(name).limit(limit)
        return [_operator(row) for row in await self._database.fetch(later)]


def _operator(row: rows.Row) -> OperatorRecord:
    return OperatorRecord(row.name, Role(row.role), row.created_unix_s, row.expires_unix_s)
