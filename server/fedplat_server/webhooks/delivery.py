"""The delivery of events to webhooks: a background task of the leader, and one signed POST for each.

It schedules a delivery of each event for each webhook, and sends those of one webhook in the order of their numbers.
Webhooks are independent: a slow receiver delays no other one. A delivery is recorded after the response, so after a
crash it may be sent twice, with the same `webhook-id`, but it is never lost. A failed one is sent again later
(`records.webhooks.RETRY_DELAYS_S`), while the following ones continue.

It needs control of the address that is connected to, and a limit on everything that the receiver sends. So it uses
asyncio's connections and h11, the HTTP parser of uvicorn, without a client library: there are no redirects, no proxies
from the environment, no cookies and no connection pool. h11 is a dependency of the server already.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import h11

from fedplat.texts import shorten
from fedplat_server import __version__, crash_points, logs, retries
from fedplat_server.database.store import Store
from fedplat_server.errors import LeadershipLostError, StoreError
from fedplat_server.instruments import Instruments
from fedplat_server.records import events
from fedplat_server.webhooks.addresses import Network, Resolve, Resolver, select_addresses

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

    async def test(self, webhook: events.WebhookRecord) -> events.DeliveryRecord:
        """Send an event of the type "webhook.test" once, and return the result. It is not stored."""
        now = self._clock()
        event = events.EventRow(
            0, now, events.EventType.WEBHOOK_TEST, subject=webhook.webhook_id, text="a test of this webhook"
        )
        message_id = f"{events.message_id(webhook.webhook_id, 0)}_{secrets.token_hex(6)}"
        result = await self.sender.send(webhook, event, message_id, now)
        state = events.DeliveryState.DELIVERED if result.accepted else events.DeliveryState.FAILED
        return events.DeliveryRecord(webhook.webhook_id, event, state, 1, result.text, self._clock())

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            workers: dict[str, asyncio.Task[None]] = {}
            while True:
                appended = self._store.events.next_append()
                self._changed.clear()
                try:
                    found = set(await self._store.webhooks.list_ids())
                    while found and await self._store.webhooks.schedule_deliveries():
                        self._wake_workers()
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
        message_id = events.message_id(webhook_id, delivery.event.sequence)
        with crash_points.step("delivery.send"):
            result = await self.sender.send(webhook, delivery.event, message_id, self._clock())
        tried = events.after_attempt(delivery, result, self._clock(), self._rng.random())
        _log_attempt(webhook, tried, result)
        is_last = tried.state is events.DeliveryState.FAILED
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


def _log_attempt(webhook: events.WebhookRecord, tried: events.DeliveryRecord, result: events.SendResult) -> None:
    log = logs.get().debug if result.accepted else logs.get().warning
    log(
        "an event was delivered to a webhook" if result.accepted else "an event could not be delivered to a webhook",
        webhook=webhook.webhook_id,
        receiver=events.parse_url(webhook.url).origin,
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


TIMEOUT_S = 15.0
"""The time limit of a request, from the resolution of the name to the response."""
MAX_HEAD_BYTES = 16 * 2**10
"""Maximum size of the head of a response."""
MAX_BODY_BYTES = 2**10
"""Maximum size of the part of a response's body that is read, and then dropped."""
_PART_BYTES = 2**10


class WebhookSender:
    """Sends events to webhooks.

    `allowed` are the networks that webhooks may reach although they are not public. `resolve` and `timeout_s` are
    arguments for tests.
    """

    def __init__(
        self, allowed: Sequence[Network] = (), resolve: Resolve | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._allowed = tuple(allowed)
        self._resolver = Resolver()
        self._resolve = resolve or self._resolver
        self._timeout_s = timeout_s
        self._context: ssl.SSLContext | None = None

    def check_url(self, url: str) -> None:
        """Raise `ValueError` for a URL that no webhook of this server can have. Names are resolved by each request."""
        target = events.parse_url(url)
        if not target.is_secure and not self._allowed:
            raise ValueError(
                "the URL is without TLS; expected https://, or a server that runs with --webhook-network CIDR for the "
                "receiver's network"
            )
        if _is_address(target.host):
            try:
                select_addresses([target.host], self._allowed, is_secure=target.is_secure)
            except PermissionError as exc:
                raise ValueError(str(exc)) from exc

    async def send(
        self, webhook: events.WebhookRecord, event: events.EventRow, message_id: str, unix_s: float
    ) -> events.SendResult:
        """Send an event once, and return the result. A status of 2xx means that the receiver accepted it."""
        target = events.parse_url(webhook.url)
        body = events.encode_payload(event)
        timestamp = int(unix_s)
        headers = [
            ("host", target.authority),
            ("user-agent", f"fedplat/{__version__}"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("webhook-id", message_id),
            ("webhook-timestamp", str(timestamp)),
            ("webhook-signature", events.sign_delivery(webhook.secret, message_id, timestamp, body)),
        ]
        request = h11.Request(method="POST", target=target.path, headers=headers)
        try:
            async with asyncio.timeout(self._timeout_s), self._connect(target) as (reader, writer):
                status = await _exchange(reader, writer, request, body)
        except (OSError, h11.ProtocolError) as exc:
            return events.SendResult(False, shorten(self._describe(exc), events.MAX_RESULT_BYTES))
        note = " (redirects are not followed)" if 300 <= status < 400 else ""
        return events.SendResult(200 <= status < 300, f"{status}{note}")

    def close(self) -> None:
        """Release the threads that resolve names."""
        self._resolver.close()

    @contextlib.asynccontextmanager
    async def _connect(
        self, target: events.WebhookTarget
    ) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection to the first allowed address of the target that accepts one."""
        found = [target.host] if _is_address(target.host) else await self._resolve(target.host, target.port)
        addresses = select_addresses(found, self._allowed, is_secure=target.is_secure)
        if target.is_secure and self._context is None:
            # The authorities of this machine; OpenSSL's variable SSL_CERT_FILE names others.
            self._context = await asyncio.to_thread(ssl.create_default_context)
        reader, writer = await _open_first(addresses, target, self._context if target.is_secure else None)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()  # without waiting for the receiver to close its side

    def _describe(self, exc: Exception) -> str:
        match exc:
            case TimeoutError():
                return f"no response within {self._timeout_s:g} s"
            case PermissionError():
                return str(exc)
            case ConnectionRefusedError():
                return "connection refused"
            case socket.gaierror():
                return "the host name is not known"
            case ssl.SSLCertVerificationError():
                return f"the certificate is not valid: {exc.verify_message}"
            case ssl.SSLError():
                return f"TLS failed: {exc.reason or exc}"
            case h11.ProtocolError():
                return "the response is not HTTP/1.1"
            case OSError():
                return exc.strerror or str(exc) or type(exc).__name__
            case _:
                raise exc


async def _open_first(
    addresses: Sequence[str], target: events.WebhookTarget, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that accepts a connection. Raises the error of the last one."""
    name = target.host if context is not None else None
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return await asyncio.open_connection(address, target.port, ssl=context, server_hostname=name)
    return await asyncio.open_connection(addresses[-1], target.port, ssl=context, server_hostname=name)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: h11.Request, body: bytes
) -> int:
    """Send a request and return the status of its response. Raises `h11.ProtocolError` for other responses."""
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
    for event in (request, h11.Data(data=body), h11.EndOfMessage()):
        writer.write(connection.send(event) or b"")
    await writer.drain()
    status, num_left = 0, MAX_HEAD_BYTES
    while num_left > 0:
        event = connection.next_event()
        match event:
            case h11.NEED_DATA:
                part = await reader.read(min(_PART_BYTES, num_left))
                num_left -= len(part)
                connection.receive_data(part)
            case h11.Response():
                status, num_left = event.status_code, MAX_BODY_BYTES
            case h11.InformationalResponse() | h11.Data():
                pass
            case _:
                break
    if not status:
        raise h11.RemoteProtocolError("the receiver closed the connection, or sent too much, before a response")
    return status


def _is_address(host: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError:
        return False
    return True
