"""The delivery of events to webhooks: a background task of the leader.

It schedules a delivery of each event for each webhook, and sends those of one webhook in the order of their numbers.
Webhooks are independent: a slow receiver delays no other one. A delivery is recorded after the response, so after a
crash it may be sent twice, with the same `webhook-id`, but it is never lost. A failed one is sent again later
(`records.webhooks.RETRY_DELAYS_S`), while the following ones continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable

from fedplat_server import crash_points, logs, retries
from fedplat_server.database.store import Store
from fedplat_server.errors import LeadershipLostError, StoreError
from fedplat_server.instruments import Instruments
from fedplat_server.records import webhooks
from fedplat_server.records.events import EventRow, EventType
from fedplat_server.records.webhooks import DeliveryRecord, DeliveryState, SendResult, WebhookRecord
from fedplat_server.webhooks.sender import WebhookSender

POLL_S = 5.0
"""Interval in which the task looks for events and webhooks that it was not notified of."""


class DeliveryTask:
    """The background task. `clock` returns the Unix time, on which the times of retries are."""

    def __init__(
        self,
        store: Store,
        sender: WebhookSender,
        instruments: Instruments,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._store = store
        self.sender = sender
        self._results = instruments.webhook_deliveries
        self._clock = clock
        self._rng = rng or random.Random()
        self._poll_s = poll_s
        self._changed = asyncio.Event()
        self._wakes: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="webhooks")
        self._task.add_done_callback(_log_failure)

    async def close(self) -> None:
        """Stop at once. Requests in progress are cut off; the next start of the daemon repeats them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.sender.close()

    def wake(self) -> None:
        """Look for events, webhooks and due deliveries now: a webhook was added or removed, or the clock was set."""
        self._changed.set()
        self._wake_workers()

    async def test(self, webhook: WebhookRecord) -> DeliveryRecord:
        """Send an event of the type "webhook.test" once, and return the result. It is not stored."""
        now = self._clock()
        event = EventRow(0, now, EventType.WEBHOOK_TEST, subject=webhook.webhook_id, text="a test of this webhook")
        message_id = f"{webhooks.message_id(webhook.webhook_id, 0)}_{secrets.token_hex(6)}"
        result = await self.sender.send(webhook, event, message_id, now)
        state = DeliveryState.DELIVERED if result.accepted else DeliveryState.FAILED
        return DeliveryRecord(webhook.webhook_id, event, state, 1, result.text, self._clock())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            workers: dict[str, asyncio.Task[None]] = {}
            while True:
                appended = self._store.events.next_append()
                self._changed.clear()
                try:
                    found = set(await self._store.webhooks.list_ids())
                    await self._schedule(found)
                except LeadershipLostError:
                    raise
                except StoreError as exc:
                    self._wake_workers()  # deliveries may have been scheduled although the reply was lost
                    await self._pause(exc)
                    continue
                for webhook_id in workers.keys() - found:
                    workers.pop(webhook_id).cancel()
                    del self._wakes[webhook_id]
                for webhook_id in sorted(found - workers.keys()):
                    self._wakes[webhook_id] = asyncio.Event()
                    work = self._deliver(webhook_id, self._wakes[webhook_id])
                    workers[webhook_id] = group.create_task(work, name=f"webhook {webhook_id}")
                # Without a webhook no round costs a query: only a new webhook, or the poll, ends the wait.
                await self._wait(*([self._changed, appended] if found else [self._changed]))

    async def _schedule(self, found: set[str]) -> None:
        while found and await self._store.webhooks.schedule_deliveries():
            self._wake_workers()

    def _wake_workers(self) -> None:
        for wake in self._wakes.values():
            wake.set()

    async def _deliver(self, webhook_id: str, wake: asyncio.Event) -> None:
        """Send the deliveries of a webhook, one after the other, as they become due."""
        while True:
            wake.clear()
            try:
                delay_s = await self._deliver_next(webhook_id)
            except LeadershipLostError:
                raise
            except StoreError as exc:
                await self._pause(exc)
                continue
            if delay_s is None or delay_s > 0.0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(wake.wait(), delay_s)

    async def _deliver_next(self, webhook_id: str) -> float | None:
        """Send the next delivery if it is due, and return 0; else return the time to wait (None: until an event)."""
        webhook = await self._store.webhooks.find_webhook(webhook_id)
        delivery = await self._store.webhooks.find_next_delivery(webhook_id)
        if webhook is None or delivery is None or delivery.next_unix_s is None:
            return None
        delay_s = delivery.next_unix_s - self._clock()
        if delay_s > 0.0:
            return delay_s
        message_id = webhooks.message_id(webhook_id, delivery.event.sequence)
        with crash_points.step("delivery.send"):
            result = await self.sender.send(webhook, delivery.event, message_id, self._clock())
        tried = webhooks.after_attempt(delivery, result, self._clock(), self._rng.random())
        _log_attempt(webhook, tried, result)
        is_last = tried.state is DeliveryState.FAILED
        self._results.labels("delivered" if result.accepted else "abandoned" if is_last else "failed").inc()
        await self._store.webhooks.record_attempt(tried)
        return 0.0

    async def _wait(self, *signals: asyncio.Event) -> None:
        """Wait until one of the events is set, or the poll is due."""
        tasks = [asyncio.create_task(signal.wait()) for signal in signals]
        try:
            await asyncio.wait(tasks, timeout=self._poll_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pause(self, exc: StoreError) -> None:
        logs.get().warning("webhooks wait for the database", error=str(exc))
        await asyncio.sleep(retries.BACKGROUND_RETRY_S)


def _log_attempt(webhook: WebhookRecord, tried: DeliveryRecord, result: SendResult) -> None:
    log = logs.get().debug if result.accepted else logs.get().warning
    log(
        "an event was delivered to a webhook" if result.accepted else "an event could not be delivered to a webhook",
        webhook=webhook.webhook_id,
        receiver=webhooks.parse_url(webhook.url).origin,
        sequence=tried.event.sequence,
        attempt=tried.num_attempts,
        state=tried.state,
        result=result.text,
    )


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log an error that ended the task. Without the lead it ends on purpose: the next leader delivers."""
    if task.cancelled() or (exc := task.exception()) is None:
        return
    lost = exc.subgroup(LeadershipLostError) if isinstance(exc, BaseExceptionGroup) else None
    if not isinstance(exc, LeadershipLostError) and lost is None:
        logs.get().error("events are not delivered to webhooks any more; restart the server", exc_info=exc)
