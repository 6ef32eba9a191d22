"""Operators and the audit log in a SQL database."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Select, select

from fedplat_server import audit as log
from fedplat_server.audit import AuditEntry, AuditHead, AuditRow
from fedplat_server.errors import OperatorError
from fedplat_server.operators import OperatorRecord, Role
from fedplat_server.store import rows, writes
from fedplat_server.store.database import Database
from fedplat_server.store.people import require_another_admin
from fedplat_server.store.tables import audit_head, audit_log, operators


def append(connection: Connection, entries: Sequence[AuditEntry], unix_s: float) -> None:
    """Appends audit entries in the transaction of a change.

    The last step of every transaction that does so: the head's row stays locked until its end, so nobody forks the
    chain, and whoever waits for it holds nothing that the other could want.
    """
    if not entries:
        return
    at = connection.execute(select(audit_head).with_for_update()).one()
    appended, head = log.chain(entries, unix_s, AuditHead(at.num_rows, at.hash))
    connection.execute(audit_log.insert(), [dataclasses.asdict(row) for row in appended])
    connection.execute(audit_head.update().values(dataclasses.asdict(head)))


class SqlPeople:
    """What `SqlStore` does of `people.OperatorStore` and `people.AuditStore`."""

    _database: Database
    _clock: Callable[[], float]

    async def add_operator(self, operator: OperatorRecord, token_hash: bytes, audit: Sequence[AuditEntry] = ()) -> None:
        """Adds an operator; see the port."""
        values = {**dataclasses.asdict(operator), "token_hash": token_hash}
        insert = writes.insert(self._database.dialect, operators).values(values)
        insert = insert.on_conflict_do_nothing(index_elements=["name"])

        def work(connection: Connection) -> None:
            if connection.execute(insert).rowcount != 1:
                raise OperatorError(f"there is an operator {operator.name} already; remove it first or choose another")
            append(connection, audit, self._clock())

        await self._database.write(work)

    async def remove_operator(
        self, name: str, audit: Sequence[AuditEntry] = (), *, keep_an_admin: bool = False
    ) -> None:
        """Removes an operator; see the port."""
        # Locked, in one order: of two admins who remove each other, the second waits here, and finds one admin less.
        admins = select(operators).where(operators.c.role == Role.ADMIN).order_by(operators.c.name).with_for_update()

        def work(connection: Connection) -> None:
            if keep_an_admin:
                found = [_operator(row) for row in connection.execute(admins)]
                require_another_admin(found, name, self._clock())
            if connection.execute(operators.delete().where(operators.c.name == name)).rowcount != 1:
                raise OperatorError(f"there is no operator {name}")
            append(connection, audit, self._clock())

        await self._database.write(work)

    async def operator_by_token(self, token_hash: bytes) -> OperatorRecord | None:
        """The operator with this token; see the port."""
        found = await self._rows(select(operators).where(operators.c.token_hash == token_hash))
        return _operator(found[0]) if found else None

    async def list_operators(self, *, after: str = "", limit: int | None = None) -> list[OperatorRecord]:
        """The first operators after a name; see the port."""
        # In the order of the characters' numbers, as SQLite and Python have it, whatever the database's language is.
        name = operators.c.name.collate("C") if self._database.dialect == "postgresql" else operators.c.name
        return list(map(_operator, await self._rows(select(operators).where(name > after).order_by(name).limit(limit))))

    async def append_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Appends entries; see the port."""
        await self._database.write(lambda connection: append(connection, entries, self._clock()))

    async def list_audit(self, after_sequence: int = 0, limit: int = 1000) -> list[AuditRow]:
        """Rows after a sequence number, oldest first."""
        later = select(audit_log).where(audit_log.c.sequence > after_sequence)
        found = await self._rows(later.order_by(audit_log.c.sequence).limit(limit))
        return [_audit_row(row) for row in found]

    async def audit_head(self) -> AuditHead:
        """Where the log ends, by the note that is kept of it."""
        row = (await self._rows(select(audit_head)))[0]
        return AuditHead(row.num_rows, row.hash)

    async def _rows(self, query: Select[Any]) -> Sequence[rows.Row]:
        def work(connection: Connection) -> Sequence[rows.Row]:
            return connection.execute(query).all()

        return await self._database.read(work)


def _operator(row: rows.Row) -> OperatorRecord:
    return OperatorRecord(row.name, Role(row.role), row.created_unix_s, row.expires_unix_s)


def _audit_row(row: rows.Row) -> AuditRow:
    return AuditRow(**{field.name: getattr(row, field.name) for field in dataclasses.fields(AuditRow)})
