"""Operators in a SQL database."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sqlalchemy import Connection, select

from fedplat_server.database import rows
from fedplat_server.database.sql_audit import append_entries
from fedplat_server.database.sql_events import append_events
from fedplat_server.database.tables import operators
from fedplat_server.database.transactions import Clock, Database
from fedplat_server.errors import OperatorError
from fedplat_server.records.audit import AuditEntry
from fedplat_server.records.events import EventEntry, EventType
from fedplat_server.records.operators import OperatorRecord, Role, require_another_admin


class OperatorStore:
    """The operators that may use the services of `admin.proto`."""

    def __init__(self, database: Database, clock: Clock) -> None:
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
            append_events(connection, [added], self._clock())
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
            append_events(connection, [removed], self._clock())
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
