"""The HTTP requests of webhooks: one signed POST over a connection of its own.

It needs control of the address that is connected to, and a limit on everything that the receiver sends. So it uses
asyncio's connections and h11, the HTTP parser of uvicorn, without a client library: there are no redirects, no proxies
from the environment, no cookies and no connection pool. h11 is a dependency of the server already.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, Sequence

import h11

from fedplat.texts import shorten
from fedplat_server import __version__
from fedplat_server.records import webhooks
from fedplat_server.records.events import EventRow
from fedplat_server.records.webhooks import SendResult, WebhookRecord, WebhookTarget
from fedplat_server.webhooks.addresses import Network, Resolve, Resolver, select_addresses

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
        target = webhooks.parse_url(url)
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

    async def send(self, webhook: WebhookRecord, event: EventRow, message_id: str, unix_s: float) -> SendResult:
        """Send an event once, and return the result. A status of 2xx means that the receiver accepted it."""
        target = webhooks.parse_url(webhook.url)
        body = webhooks.encode_payload(event)
        timestamp = int(unix_s)
        headers = [
            ("host", target.authority),
            ("user-agent", f"fedplat/{__version__}"),
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("webhook-id", message_id),
            ("webhook-timestamp", str(timestamp)),
            ("webhook-signature", webhooks.sign(webhook.secret, message_id, timestamp, body)),
        ]
        request = h11.Request(method="POST", target=target.path, headers=headers)
        try:
            async with asyncio.timeout(self._timeout_s), self._connect(target) as (reader, writer):
                status = await _exchange(reader, writer, request, body)
        except (OSError, h11.ProtocolError) as exc:
            return SendResult(False, shorten(self._describe(exc), webhooks.MAX_RESULT_BYTES))
        note = " (redirects are not followed)" if 300 <= status < 400 else ""
        return SendResult(200 <= status < 300, f"{status}{note}")

    def close(self) -> None:
        """Release the threads that resolve names."""
        self._resolver.close()

    @contextlib.asynccontextmanager
    async def _connect(
        self, target: WebhookTarget
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
    addresses: Sequence[str], target: WebhookTarget, context: ssl.SSLContext | None
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
