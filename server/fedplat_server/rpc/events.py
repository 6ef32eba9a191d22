"""The services `Events`, the stored events as a list and as a stream, and `Webhooks`, with their deliveries."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Collection

from typing_extensions import override

from fedplat.wire.v1 import events_pb2, events_pb2_grpc
from fedplat_server.auth.client_directory import new_id
from fedplat_server.coordination.long_polls import EventFeed
from fedplat_server.database.sql_audit import EventStore
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, RefusedError, WebhookError
from fedplat_server.messages import convert
from fedplat_server.records import audit, events
from fedplat_server.records.events import TYPE_NAMES, DeliveryRecord, DeliveryState, EventRow, WebhookRecord
from fedplat_server.rpc import interceptor, operator_access, pages
from fedplat_server.rpc.interceptor import Context
from fedplat_server.rpc.job_registry import JobRegistry
from fedplat_server.webhooks.delivery import DeliveryTask


class EventsService(events_pb2_grpc.EventsServicer):
    """The handlers of the service."""

    def __init__(self, jobs: JobRegistry, store: EventStore, feed: EventFeed, draining: asyncio.Event) -> None:
        """`draining` is set when the daemon stops."""
        self._jobs = jobs
        self._store = store
        self._feed = feed
        self._draining = draining

    @override
    async def ListEvents(
        self, request: events_pb2.ListEventsRequest, context: interceptor.Context
    ) -> events_pb2.ListEventsResponse:
        types, job_id = check_types(request.types), self._find_job(request.job)
        size, last = pages.size(request.page_size), pages.numbers(request.page_token, pages.SEQUENCE)
        found = await self._store.list_events(
            last[0] if last is not None else 0,
            types=types,
            job_id=job_id,
            newest_first=request.newest_first,
            limit=size + 1,
        )
        page, token = pages.cut(found, size, encode_event, lambda row: str(row.sequence))
        return events_pb2.ListEventsResponse(events=page, next_page_token=token)

    @override
    async def WatchEvents(
        self, request: events_pb2.WatchEventsRequest, context: interceptor.Context
    ) -> AsyncIterator[events_pb2.Event]:
        types, job_id = check_types(request.types), self._find_job(request.job)
        with self._feed.watch():
            sequence = await self._store.find_last_sequence()
            if request.HasField("after_sequence"):
                sequence = max(sequence, min(request.after_sequence, 2**62))  # within the database's range
                async for row in self._past_events(request.after_sequence, sequence, types, job_id):
                    yield encode_event(row)
            while True:
                changed = self._feed.next_change()
                found = await self._feed.read_after(sequence)
                for row in found:
                    sequence = row.sequence
                    if (not types or row.type in types) and job_id in ("", row.job_id):
                        yield encode_event(row)
                self._refuse_if_draining()
                if not found:
                    await changed.wait()

    async def _past_events(self, after: int, last: int, types: frozenset[str], job_id: str) -> AsyncIterator[EventRow]:
        """Yield the matching events after a number, up to `last`; the database leaves out the others."""
        while after < last:
            found = await self._store.list_events(after, types=types, job_id=job_id)
            for row in found:
                if row.sequence > last:
                    return
                yield row
            if not found:
                return
            after = found[-1].sequence
            self._refuse_if_draining()

    def _refuse_if_draining(self) -> None:
        """Raise an error that callers retry: the end of the stream would mean that there are no more events."""
        if self._draining.is_set():
            raise RefusedError(Code.DRAINING)

    def _find_job(self, name: str) -> str:
        return self._jobs.find(name).state.job_id if name else ""


def check_types(types: Collection[str]) -> frozenset[str]:
    """Return types of events. Raises `RefusedError` for unknown ones."""
    unknown = sorted(set(types) - TYPE_NAMES)
    if unknown:
        text = f"type {unknown[0][:80]!r}: expected one of {', '.join(sorted(TYPE_NAMES))}"
        raise RefusedError(Code.INVALID_REQUEST, text)
    return frozenset(types)


def encode_event(row: EventRow) -> events_pb2.Event:
    """Encode a stored event."""
    return convert.encode(events_pb2.Event, row)


_DELIVERY_TOKEN = re.compile(rf"([0-9]{{1,18}})\.({events.WEBHOOK_ID.pattern})")


class WebhooksService(events_pb2_grpc.WebhooksServicer):
    """The handlers of the service."""

    def __init__(self, delivery: DeliveryTask, store: Store) -> None:
        self._delivery = delivery
        self._store = store

    @override
    async def AddWebhook(
        self, request: events_pb2.AddWebhookRequest, context: Context
    ) -> events_pb2.AddWebhookResponse:
        types = tuple(sorted(check_types(request.types)))
        try:
            self._delivery.sender.check_url(request.url)
        except ValueError as exc:
            raise RefusedError(Code.INVALID_REQUEST, str(exc)) from exc
        record = WebhookRecord(new_id("w"), request.url, types, events.new_secret(), created_unix_s=time.time())
        entry = self._audit(audit.AuditAction.WEBHOOK_ADDED, record)
        try:
            await self._store.webhooks.add_webhook(record, [entry])
        except WebhookError as exc:
            raise RefusedError(Code.TOO_MANY_WEBHOOKS, f"at most {events.MAX_WEBHOOKS}") from exc
        self._delivery.wake()
        return events_pb2.AddWebhookResponse(webhook=_webhook(record), secret=record.secret)

    @override
    async def ListWebhooks(
        self, request: events_pb2.ListWebhooksRequest, context: Context
    ) -> events_pb2.ListWebhooksResponse:
        size, after = pages.size(request.page_size), pages.token(request.page_token, events.WEBHOOK_ID)
        records = await self._store.webhooks.list_webhooks(after=after, limit=size + 1)
        page, token = pages.cut(records, size, _webhook, lambda record: record.webhook_id)
        return events_pb2.ListWebhooksResponse(webhooks=page, next_page_token=token)

    @override
    async def RemoveWebhook(
        self, request: events_pb2.RemoveWebhookRequest, context: Context
    ) -> events_pb2.RemoveWebhookResponse:
        record = await self._find(request.webhook_id)
        entry = self._audit(audit.AuditAction.WEBHOOK_REMOVED, record)
        try:
            await self._store.webhooks.remove_webhook(record.webhook_id, [entry])
        except WebhookError as exc:
            raise RefusedError(Code.NO_SUCH_WEBHOOK, record.webhook_id) from exc
        self._delivery.wake()
        return events_pb2.RemoveWebhookResponse()

    @override
    async def TestWebhook(self, request: events_pb2.TestWebhookRequest, context: Context) -> events_pb2.Delivery:
        record = await self._find(request.webhook_id)
        await self._store.audit.append([self._audit(audit.AuditAction.WEBHOOK_TESTED, record)])
        return _delivery(await self._delivery.test(record))

    @override
    async def ListDeliveries(
        self, request: events_pb2.ListDeliveriesRequest, context: Context
    ) -> events_pb2.ListDeliveriesResponse:
        if request.state and request.state not in set(DeliveryState):
            text = f"state {request.state[:80]!r}: expected {', '.join(DeliveryState)}"
            raise RefusedError(Code.INVALID_REQUEST, text)
        webhook_id = (await self._find(request.webhook_id)).webhook_id if request.webhook_id else ""
        size = pages.size(request.page_size)
        match = _DELIVERY_TOKEN.fullmatch(pages.token(request.page_token, _DELIVERY_TOKEN))
        found = await self._store.webhooks.list_deliveries(
            webhook_id=webhook_id,
            state=request.state,
            before=(int(match[1]), match[2]) if match is not None else None,
            limit=size + 1,
        )
        page, token = pages.cut(found, size, _delivery, lambda one: f"{one.event.sequence}.{one.webhook_id}")
        return events_pb2.ListDeliveriesResponse(deliveries=page, next_page_token=token)

    async def _find(self, webhook_id: str) -> WebhookRecord:
        """Return a webhook. Raises `RefusedError` if it is unknown."""
        record = None
        if events.WEBHOOK_ID.fullmatch(webhook_id):
            record = await self._store.webhooks.find_webhook(webhook_id)
        if record is None:
            raise RefusedError(Code.NO_SUCH_WEBHOOK, repr(webhook_id[:80]))
        return record

    def _audit(self, action: audit.AuditAction, record: WebhookRecord) -> audit.AuditEntry:
        """Return an audit entry without the path of the URL, which may contain a secret."""
        origin = events.parse_url(record.url).origin
        return audit.AuditEntry(operator_access.current_operator(), action, record.webhook_id, {"receiver": origin})


def _webhook(record: WebhookRecord) -> events_pb2.Webhook:
    return events_pb2.Webhook(
        webhook_id=record.webhook_id,
        url=record.url,
        types=record.types,
        created_unix_s=record.created_unix_s,
        num_pending=record.num_pending,
        oldest_unix_s=record.oldest_unix_s,
        last_result=record.last_result,
        last_unix_s=record.last_unix_s or 0.0,
        failing_since_unix_s=record.failing_since_unix_s or 0.0,
    )


def _delivery(record: DeliveryRecord) -> events_pb2.Delivery:
    return convert.encode(events_pb2.Delivery, record, event=encode_event(record.event))
