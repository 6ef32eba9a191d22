"""Events in a SQL database."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Sequence

import sqlalchemy
from sqlalchemy import Connection, func, select

from fedplat_server.database import rows, transactions
from fedplat_server.database.tables import STILL_PENDING, deliveries, event_head, events, webhooks
from fedplat_server.records.events import Alert, DeliveryState, EventEntry, EventRow, EventType, alert_event

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
            # the first event that a webhook needs, or that its cursor has not reached; None: no event
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
