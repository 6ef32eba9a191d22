"""The service `Webhooks`: webhooks, and the deliveries of events to them."""

from __future__ import annotations

import re
import time

from typing_extensions import override

from fedplat.wire.v1 import events_pb2, events_pb2_grpc
from fedplat_server.auth.enrollment import new_id
from fedplat_server.database.store import Store
from fedplat_server.errors import Code, RefusedError, WebhookError
from fedplat_server.messages import convert
from fedplat_server.records import audit, events
from fedplat_server.records.events import DeliveryRecord, DeliveryState, WebhookRecord
from fedplat_server.rpc import operator_access, pages
from fedplat_server.rpc.events import check_types, encode_event
from fedplat_server.rpc.handlers import Context
from fedplat_server.webhooks.delivery import DeliveryTask

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
