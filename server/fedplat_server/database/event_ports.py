"""The ports of events, webhooks and deliveries; `ports.py` has the others, and the rules for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from fedplat_server.records.audit import AuditEntry
from fedplat_server.records.events import AlertFacts, EventRow
from fedplat_server.records.webhooks import MAX_PENDING, DeliveryRecord, WebhookRecord

EVENTS_BATCH = 1000
"""Maximum number of events that one transaction removes."""


class EventStore(Protocol):
    """The events, numbered without gaps in the order in which they become visible."""

    def next_append(self) -> asyncio.Event:
        """Return an event that is set after the next commit of this process that appends events.

        It is not set by other processes, or if the reply of the database was lost: readers must also poll.
        """
        ...

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
        ...

    async def find_last_sequence(self) -> int:
        """Return the number of the last event; 0 without any."""
        ...

    async def record_alerts(self, raised: Sequence[AlertFacts], ended: Sequence[AlertFacts]) -> None:
        """Append the events of alerts that were raised, and of those that have ended."""
        ...

    async def list_raised_alerts(self) -> list[EventRow]:
        """Return the last event of each alert that is raised now, oldest first."""
        ...

    async def remove_events(self, before_unix_s: float, limit: int = EVENTS_BATCH) -> int:
        """Remove the first `limit` events before a time, with their ended deliveries; return the number of events.

        Keeps events that a webhook still needs, and all later ones.
        """
        ...


class WebhookStore(Protocol):
    """Webhooks, and the deliveries of events to them.

    A transaction schedules the deliveries of all events after a webhook's cursor and advances the cursor. So each event
    has exactly one delivery for each webhook that receives its type.
    """

    async def add_webhook(self, webhook: WebhookRecord, audit: Sequence[AuditEntry] = ()) -> None:
        """Add a webhook, which receives later events only. Raises `WebhookError` if there are `MAX_WEBHOOKS`."""
        ...

    async def list_webhooks(self, *, after: str = "", limit: int | None = None) -> list[WebhookRecord]:
        """Return the first `limit` webhooks added after the one with the id `after`; [] if that is unknown."""
        ...

    async def list_ids(self) -> list[str]:
        """Return the ids of all webhooks, oldest first. Unlike `list_webhooks` it costs little with many deliveries."""
        ...

    async def find_webhook(self, webhook_id: str) -> WebhookRecord | None:
        """Return a webhook, without counting its pending deliveries."""
        ...

    async def remove_webhook(self, webhook_id: str, audit: Sequence[AuditEntry] = ()) -> None:
        """Remove a webhook with its deliveries. Raises `WebhookError` if it is unknown."""
        ...

    async def find_failing_webhooks(self, since_unix_s: float) -> list[WebhookRecord]:
        """Return the webhooks that no attempt has reached since a time or longer, though one was made."""
        ...

    async def schedule_deliveries(self, limit: int = 250) -> int:
        """Add deliveries of the next `limit` events, due now; return the number of events (0: all are scheduled)."""
        ...

    async def find_next_delivery(self, webhook_id: str) -> DeliveryRecord | None:
        """Return the pending delivery of a webhook that is due first; None without one."""
        ...

    async def record_attempt(self, delivery: DeliveryRecord) -> None:
        """Store a pending delivery after an attempt. Has no effect if the webhook was removed."""
        ...

    async def list_deliveries(
        self, *, webhook_id: str = "", state: str = "", before: tuple[int, str] | None = None, limit: int = 250
    ) -> list[DeliveryRecord]:
        """Return deliveries, the latest event first: those before an event's number and a webhook's id (None: all).

        Only those of one webhook (empty: of all), and in one state (empty: in any).
        """
        ...

    async def limit_pending(self, most: int = MAX_PENDING) -> int:
        """Fail the oldest pending deliveries of each webhook that has more than `most`; return their number."""
        ...
