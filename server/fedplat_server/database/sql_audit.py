"""Events, operators, and the audit log of what these did, in a SQL database."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Collection, Sequence

import sqlalchemy
from sqlalchemy import ColumnElement, Connection, func, select

from fedplat_server.database import rows, transactions
from fedplat_server.database.tables import (
    STILL_PENDING,
    audit_head,
    audit_log,
    deliveries,
    event_head,
    events,
    operators,
    webhooks,
)
from fedplat_server.errors import OperatorError
from fedplat_server.records import audit
from fedplat_server.records.audit import (
    ALL_ROWS,
    AuditAction,
    AuditEntry,
    AuditFilter,
    AuditHead,
    AuditRow,
    OperatorRecord,
    Role,
    require_another_admin,
)
from fedplat_server.records.events import Alert, DeliveryState, EventEntry, EventRow, EventType, alert_event


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
                raise OperatorError(f"there is no operator {name}; operator list shows their names")
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


# Built once: each round executes it.
_ADVANCE = (
    event_head.update()
    .values(last_sequence=event_head.c.last_sequence + sqlalchemy.bindparam("num_events"))
    .returning(event_head.c.last_sequence)
)
_INSERT = events.insert()

EVENTS_BATCH = 1000
"""Maximum number of events that one transaction removes."""


def append_events(connection: Connection, entries: Sequence[EventEntry], unix_s: float) -> int:
    """Append events in the transaction of a change; return the number of the last one (0 without any).

    Must be the last step of the transaction, except for `append_entries`. The row of the head stays locked until the
    end, so that events become visible in the order of their numbers.
    """
    if not entries:
        return 0
    last: int = connection.execute(_ADVANCE, {"num_events": len(entries)}).scalar_one()
    numbers = range(last - len(entries) + 1, last + 1)
    values = [
        rows.to_values(entry) | {"sequence": number, "unix_s": unix_s}
        for number, entry in zip(numbers, entries, strict=True)
    ]
    connection.execute(_INSERT, values)
    transactions.appended_rows(connection).num_events += len(entries)
    return last


class EventStore:
    """The events, numbered without gaps in the order in which they become visible."""

    def __init__(self, database: transactions.Database, clock: transactions.Clock) -> None:
        self._database = database
        self._clock = clock

    def next_append(self) -> asyncio.Event:
        """Return an event that is set after the next commit of this process that appends events.

        It is not set by other processes, or if the reply of the database was lost: readers must also poll.
        """
        return self._database.next_append()

    async def list_events(
        self,
        after: int = 0,
        *,
        types: Collection[str] = (),
        job_id: str = "",
        newest_first: bool = False,
        limit: int = 250,
    ) -> list[EventRow]:
        """Return events after a sequence number, oldest first; with `newest_first` those before it (0: all).

        Only those of some types (empty: all), and of one job (empty: of all).
        """
        query = select(events).limit(limit)
        if newest_first:
            query = query.order_by(events.c.sequence.desc())
            query = query.where(events.c.sequence < after) if after else query
        else:
            query = query.order_by(events.c.sequence).where(events.c.sequence > after)
        if types:
            query = query.where(events.c.type.in_(sorted(types)))
        if job_id:
            query = query.where(events.c.job_id == job_id)
        return [rows.to_record(row, EventRow) for row in await self._database.fetch(query)]

    async def find_last_sequence(self) -> int:
        """Return the number of the last event; 0 without any."""
        (row,) = await self._database.fetch(select(event_head.c.last_sequence))
        return row.last_sequence

    async def record_alerts(self, raised: Sequence[Alert], ended: Sequence[Alert]) -> None:
        """Append the events of alerts that were raised, and of those that have ended."""
        entries = [alert_event(EventType.ALERT_RAISED, alert) for alert in raised]
        entries += [alert_event(EventType.ALERT_ENDED, alert) for alert in ended]
        if entries:
            await self._database.write(lambda connection: append_events(connection, entries, self._clock()))

    async def list_raised_alerts(self) -> list[EventRow]:
        """Return the last event of each alert that is raised now, oldest first."""
        changes = events.c.type.in_([EventType.ALERT_RAISED, EventType.ALERT_ENDED])
        last = select(func.max(events.c.sequence)).where(changes)
        last = last.group_by(events.c.subject, events.c.job_id, events.c.population)
        query = select(events).where(events.c.sequence.in_(last), events.c.type == EventType.ALERT_RAISED)
        return [rows.to_record(row, EventRow) for row in await self._database.fetch(query.order_by(events.c.sequence))]

    async def remove_events(self, before_unix_s: float, limit: int = EVENTS_BATCH) -> int:
        """Remove the first `limit` events before a time, with their ended deliveries; return the number of events.

        Keeps events that a webhook still needs, and all later ones.
        """
        oldest = select(events.c.sequence, events.c.unix_s).order_by(events.c.sequence).limit(limit)

        def transaction(connection: Connection) -> int:
            # the first event with a pending delivery, or after the cursor of a webhook; None: no event
            pending = connection.execute(select(func.min(deliveries.c.event_sequence)).where(STILL_PENDING)).scalar()
            cursor = connection.execute(select(func.min(webhooks.c.cursor))).scalar()
            needed = [number for number in (pending, None if cursor is None else cursor + 1) if number is not None]
            kept_from = min(needed, default=None)
            old = itertools.takewhile(
                lambda row: row.unix_s < before_unix_s and (kept_from is None or row.sequence < kept_from),
                connection.execute(oldest).all(),
            )
            numbers = [row.sequence for row in old]
            if numbers:
                ended = (deliveries.c.state != DeliveryState.PENDING) & (deliveries.c.event_sequence <= numbers[-1])
                connection.execute(deliveries.delete().where(ended))
                connection.execute(events.delete().where(events.c.sequence <= numbers[-1]))
            return len(numbers)

        return await self._database.write(transaction)
