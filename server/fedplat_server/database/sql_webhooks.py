"""Webhooks and the deliveries of events to them in a SQL database.

Transactions lock the rows of webhooks before those of deliveries, so that two of them cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, func, select, tuple_

from fedplat_server import crash_points, errors
from fedplat_server.database import rows, sql_audit, transactions
from fedplat_server.database.tables import STILL_PENDING, deliveries, event_head, events, webhooks
from fedplat_server.records.audit import AuditEntry
from fedplat_server.records.events import (
    MAX_PENDING,
    MAX_WEBHOOKS,
    DeliveryRecord,
    DeliveryState,
    EventEntry,
    EventRow,
    EventType,
    WebhookRecord,
    parse_url,
)

_PROGRESS = ("state", "num_attempts", "result", "last_unix_s", "next_unix_s")
_TOO_MANY = f"there were more than {MAX_PENDING:,} pending deliveries"


class WebhookStore:
    """Webhooks, and the deliveries of events to them.

    A transaction schedules the deliveries of all events after a webhook's cursor and advances the cursor. So each event
    has exactly one delivery for each webhook that receives its type.
    """

    def __init__(self, database: transactions.Database, clock: transactions.Clock) -> None:
        self._database = database
        self._clock = clock

    async def add_webhook(self, webhook: WebhookRecord, audit: Sequence[AuditEntry] = ()) -> None:
        """Add a webhook, which receives later events only. Raises `WebhookError` if there are `MAX_WEBHOOKS`."""
        origin = parse_url(webhook.url).origin
        added = EventEntry(
            EventType.WEBHOOK_ADDED, subject=webhook.webhook_id, text=f"a webhook for {origin} was added"
        )
        values = {name: getattr(webhook, name) for name in ("webhook_id", "url", "secret", "created_unix_s")}

        def transaction(connection: Connection) -> None:
            # First the event: the lock on its head makes concurrent calls count one after the other.
            cursor = sql_audit.append_events(connection, [added], self._clock())
            count = connection.execute(select(func.count()).select_from(webhooks)).scalar_one()
            if count >= MAX_WEBHOOKS:
                raise errors.WebhookError(f"there are {count} webhooks already; remove one first")
            types = list(webhook.types)
            connection.execute(webhooks.insert().values(**values, types=types, cursor=cursor, last_result=""))
            sql_audit.append_entries(connection, audit, self._clock())

        await self._database.write(transaction)

    async def list_webhooks(self, *, after: str = "", limit: int | None = None) -> list[WebhookRecord]:
        """Return the first `limit` webhooks added after the one with the id `after`; [] if that is unknown."""
        query = select(webhooks).order_by(webhooks.c.sequence).limit(limit)
        if after:
            others = webhooks.alias()
            last = select(others.c.sequence).where(others.c.webhook_id == after).scalar_subquery()
            query = query.where(webhooks.c.sequence > last)
        first = func.min(deliveries.c.event_sequence).label("first")
        counts = select(deliveries.c.webhook_id, func.count().label("total"), first).where(STILL_PENDING)
        grouped = counts.group_by(deliveries.c.webhook_id).subquery()
        pending = select(grouped, events.c.unix_s).join(events, events.c.sequence == grouped.c.first, isouter=True)

        def transaction(connection: Connection) -> list[WebhookRecord]:
            found = {row.webhook_id: row for row in connection.execute(pending)}
            return [_webhook(row, found.get(row.webhook_id)) for row in connection.execute(query)]

        return await self._database.read(transaction)

    async def list_ids(self) -> list[str]:
        """Return the ids of all webhooks, oldest first. Unlike `list_webhooks` it costs little with many deliveries."""
        found = await self._database.fetch(select(webhooks.c.webhook_id).order_by(webhooks.c.sequence))
        return [row.webhook_id for row in found]

    async def find_webhook(self, webhook_id: str) -> WebhookRecord | None:
        """Return a webhook, without counting its pending deliveries."""
        found = await self._database.fetch(select(webhooks).where(webhooks.c.webhook_id == webhook_id))
        return _webhook(found[0]) if found else None

    async def remove_webhook(self, webhook_id: str, audit: Sequence[AuditEntry] = ()) -> None:
        """Remove a webhook with its deliveries. Raises `WebhookError` if it is unknown."""
        mine = webhooks.c.webhook_id == webhook_id
        lock = select(webhooks.c.url).where(mine).with_for_update()

        def transaction(connection: Connection) -> None:
            url = connection.execute(lock).scalar_one_or_none()
            if url is None:
                raise errors.WebhookError(f"there is no webhook {webhook_id}")
            connection.execute(deliveries.delete().where(deliveries.c.webhook_id == webhook_id))
            connection.execute(webhooks.delete().where(mine))
            text = f"the webhook for {parse_url(url).origin} was removed"
            removed = EventEntry(EventType.WEBHOOK_REMOVED, subject=webhook_id, text=text)
            sql_audit.append_events(connection, [removed], self._clock())
            sql_audit.append_entries(connection, audit, self._clock())

        await self._database.write(transaction)

    async def find_failing_webhooks(self, since_unix_s: float) -> list[WebhookRecord]:
        """Return the webhooks that no attempt has reached since a time or longer, though one was made."""
        failing = webhooks.c.failing_since_unix_s <= since_unix_s
        found = await self._database.fetch(select(webhooks).where(failing).order_by(webhooks.c.sequence))
        return [_webhook(row) for row in found]

    async def schedule_deliveries(self, limit: int = 250) -> int:
        """Add deliveries of the next `limit` events, due now; return the number of events (0: all are scheduled)."""
        now = self._clock()
        last = select(event_head.c.last_sequence)
        behind = select(webhooks).where(webhooks.c.cursor < sqlalchemy.bindparam("last"))
        behind = behind.order_by(webhooks.c.sequence).with_for_update()

        def transaction(connection: Connection) -> int:
            found = connection.execute(behind, {"last": connection.execute(last).scalar_one()}).all()
            if not found:
                return 0
            first = min(row.cursor for row in found)
            query = select(events.c.sequence, events.c.type).where(events.c.sequence > first)
            page = connection.execute(query.order_by(events.c.sequence).limit(limit)).all()
            assert page, "an event that a webhook needs was removed"
            values = [
                {
                    "event_sequence": event.sequence,
                    "webhook_id": webhook.webhook_id,
                    "state": DeliveryState.PENDING,
                    "num_attempts": 0,
                    "result": "",
                    "last_unix_s": None,
                    "next_unix_s": now,
                }
                for webhook in found
                for event in page
                if event.sequence > webhook.cursor and (not webhook.types or event.type in webhook.types)
            ]
            if values:
                connection.execute(deliveries.insert(), values)
            ids = [row.webhook_id for row in found if row.cursor < page[-1].sequence]
            moved = webhooks.update().where(webhooks.c.webhook_id.in_(ids)).values(cursor=page[-1].sequence)
            connection.execute(moved)
            return len(page)

        with crash_points.step("delivery.schedule"):
            return await self._database.write(transaction)

    async def find_next_delivery(self, webhook_id: str) -> DeliveryRecord | None:
        """Return the pending delivery of a webhook that is due first; None without one."""
        query = _with_event().where(deliveries.c.webhook_id == webhook_id, STILL_PENDING)
        found = await self._database.fetch(
            query.order_by(deliveries.c.next_unix_s, deliveries.c.event_sequence).limit(1)
        )
        return _delivery(found[0]) if found else None

    async def record_attempt(self, delivery: DeliveryRecord) -> None:
        """Store a pending delivery after an attempt. Has no effect if the webhook was removed."""
        is_over = delivery.state is DeliveryState.DELIVERED
        since = func.coalesce(webhooks.c.failing_since_unix_s, delivery.last_unix_s)
        tried = webhooks.update().where(webhooks.c.webhook_id == delivery.webhook_id)
        tried = tried.values(
            last_result=delivery.result,
            last_unix_s=delivery.last_unix_s,
            failing_since_unix_s=None if is_over else since,
        )
        mine = deliveries.update().where(
            deliveries.c.webhook_id == delivery.webhook_id,
            deliveries.c.event_sequence == delivery.event.sequence,
            STILL_PENDING,
        )
        mine = mine.values({name: getattr(delivery, name) for name in _PROGRESS})

        def transaction(connection: Connection) -> None:
            if connection.execute(tried).rowcount:
                connection.execute(mine)

        with crash_points.step("delivery.record"):
            await self._database.write(transaction)

    async def list_deliveries(
        self, *, webhook_id: str = "", state: str = "", before: tuple[int, str] | None = None, limit: int = 250
    ) -> list[DeliveryRecord]:
        """Return deliveries, the latest event first: those before an event's number and a webhook's id (None: all).

        Only those of one webhook (empty: of all), and in one state (empty: in any).
        """
        key = (deliveries.c.event_sequence, deliveries.c.webhook_id)
        query = _with_event().order_by(*(column.desc() for column in key)).limit(limit)
        if webhook_id:
            query = query.where(deliveries.c.webhook_id == webhook_id)
        if state:
            query = query.where(deliveries.c.state == state)
        if before is not None:
            query = query.where(tuple_(*key) < before)
        return [_delivery(row) for row in await self._database.fetch(query)]

    async def limit_pending(self, most: int = MAX_PENDING) -> int:
        """Fail the oldest pending deliveries of each webhook that has more than `most`; return their number."""
        counts = select(deliveries.c.webhook_id).where(STILL_PENDING).group_by(deliveries.c.webhook_id)
        crowded = counts.having(func.count() > most)

        def transaction(connection: Connection) -> int:
            num_failed = 0
            for webhook_id in connection.execute(crowded).scalars().all():
                mine = (deliveries.c.webhook_id == webhook_id) & STILL_PENDING
                newest = select(deliveries.c.event_sequence).where(mine)
                newest = newest.order_by(deliveries.c.event_sequence.desc()).offset(most).limit(1)
                excess = deliveries.update().where(mine, deliveries.c.event_sequence <= newest.scalar_subquery())
                failed = excess.values(state=DeliveryState.FAILED, result=_TOO_MANY, next_unix_s=None)
                num_failed += connection.execute(failed).rowcount
            return num_failed

        return await self._database.write(transaction)


def _webhook(row: rows.Row, pending: rows.Row | None = None) -> WebhookRecord:
    kept: rows.Values = {name: getattr(row, name) for name in rows.field_names(WebhookRecord) if name in webhooks.c}
    kept["types"] = tuple(row.types)
    return WebhookRecord(
        **kept,
        num_pending=pending.total if pending is not None else 0,
        oldest_unix_s=(pending.unix_s or 0.0) if pending is not None else 0.0,
    )


def _with_event() -> sqlalchemy.Select[Any]:
    """Return a query for deliveries with their events. No event is removed before its deliveries."""
    return select(deliveries, events).join(events, events.c.sequence == deliveries.c.event_sequence)


def _delivery(row: rows.Row) -> DeliveryRecord:
    progress: rows.Values = {name: getattr(row, name) for name in _PROGRESS}
    progress["state"] = DeliveryState(row.state)
    return DeliveryRecord(webhook_id=row.webhook_id, event=rows.to_record(row, EventRow), **progress)
