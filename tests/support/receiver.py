"""A receiver of webhooks on a real socket: it records every request, and answers as the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import standardwebhooks

from support.raw_client import PATIENCE_S

OK = b"HTTP/1.1 204 No Content\r\n\r\n"


def answer(status: int, *headers: str, body: bytes = b"") -> bytes:
    """A response of HTTP."""
    lines = [f"HTTP/1.1 {status} Any", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@dataclasses.dataclass(frozen=True)
class Delivered:
    """A request that has arrived."""

    line: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def event_id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def payload(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def type(self) -> str:
        return self.payload["type"]

    def verify(self, secret: str) -> None:
        """Checks the signature with the library of the standard. Raises its error."""
        standardwebhooks.Webhook(secret).verify(self.body.decode(), dict(self.headers))


class Receiver:
    """The receiver. `respond` returns the bytes of an answer, or None to stay silent; `delivered` is what came."""

    def __init__(self) -> None:
        self.delivered: list[Delivered] = []
        self.respond: Callable[[Delivered], bytes | None] = lambda _: OK
        self.port = 0
        self.scheme = "http"
        self._changed = asyncio.Condition()
        self._over = asyncio.Event()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/hooks?key=path-secret"

    async def until(self, condition: Callable[[list[Delivered]], bool]) -> list[Delivered]:
        """Waits until what has arrived is as the condition wants it."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: condition(self.delivered))
        return list(self.delivered)

    async def until_number(self, number: int) -> list[Delivered]:
        return await self.until(lambda delivered: len(delivered) >= number)

    def close(self) -> None:
        """Closes the connections that were not answered."""
        self._over.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, ssl.SSLError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            pairs = (line.split(": ", 1) for line in head[1:] if line)
            headers = {name.lower(): value for name, value in pairs}
            body = await reader.readexactly(int(headers["content-length"]))
            request = Delivered(head[0], headers, body)
            async with self._changed:
                self.delivered.append(request)
                self._changed.notify_all()
            response = self.respond(request)
            if response is None:
                await self._over.wait()
            else:
                writer.write(response)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def receiving(port: int = 0, context: ssl.SSLContext | None = None) -> AsyncGenerator[Receiver]:
    """A receiver that listens on a port of loopback, with TLS if there is a context."""
    receiver = Receiver()
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", port, ssl=context)
    receiver.port = server.sockets[0].getsockname()[1]
    receiver.scheme = "https" if context is not None else "http"
    try:
        yield receiver
    finally:
        receiver.close()
        server.close()
        await server.wait_closed()
