"""Operators in a SQL database."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sqlalchemy import Connection, select

from fedplat_server.database import rows
from fedplat_server.database.sql_audit import append_entries
from fedplat_server.database.tables import operators
from fedplat_server.database.transactions import Clock, Database
from fedplat_server.errors import OperatorError
from fedplat_server.records.audit import AuditEntry
from fedplat_server.records.operators import OperatorRecord, Role, require_another_admin


class SqlOperators:
    """The adapter of `ports.OperatorStore`."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def add_operator(self, operator: OperatorRecord, token_hash: bytes, audit: Sequence[AuditEntry] = ()) -> None:
        """Add an operator; see the port."""
        values = {**dataclasses.asdict(operator), "token_hash": token_hash}
        insert = rows.insert(self._database.dialect, operators).values(values)
        insert = insert.on_conflict_do_nothing(index_elements=["name"])

        def work(connection: Connection) -> None:
            if connection.execute(insert).rowcount != 1:
                raise OperatorError(f"there is an operator {operator.name} already; remove it first or choose another")
            append_entries(connection, audit, self._clock())

        await self._database.write(work)

    async def remove_operator(
        self, name: str, audit: Sequence[AuditEntry] = (), *, keep_an_admin: bool = False
    ) -> None:
        """Remove an operator; see the port."""
        # Locked, in one order: of two admins who remove each other, the second waits here, and finds one admin less.
        admins = select(operators).where(operators.c.role == Role.ADMIN).order_by(operators.c.name).with_for_update()

        def work(connection: Connection) -> None:
            if keep_an_admin:
                found = [_operator(row) for row in connection.execute(admins)]
                require_another_admin(found, name, self._clock())
            if connection.execute(operators.delete().where(operators.c.name == name)).rowcount != 1:
                raise OperatorError(f"there is no operator {name}")
            append_entries(connection, audit, self._clock())

        await self._database.write(work)

    async def find_operator(self, token_hash: bytes) -> OperatorRecord | None:
        """Return the operator with this token; see the port."""
        found = await self._database.fetch(select(operators).where(operators.c.token_hash == token_hash))
        return _operator(found[0]) if found else None

    async def list_operators(self, *, after: str = "", limit: int | None = None) -> list[OperatorRecord]:
        """Return the first operators after a name; see the port."""
        # In the order of code points, as SQLite and Python have it, whatever the collation of the database is.
        name = operators.c.name.collate("C") if self._database.dialect == "postgresql" else operators.c.name
        later = select(operators).where(name > after).order_by(name).limit(limit)
        return [_operator(row) for row in await self._database.fetch(later)]


def _operator(row: rows.Row) -> OperatorRecord:
    return OperatorRecord(row.name, Role(row.role), row.created_unix_s, row.expires_unix_s)
