"""A response over HTTP, and requests that are refused before they are calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from fedplat.wire import http, messages

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]
_NO_STORE = (b"cache-control", b"no-store")


class RequestProblem(NamedTuple):
    """A request that is not a call, or a call that is refused: its status of HTTP, and a sentence."""

    status: int
    text: str
    code: str = "invalid_argument"
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Response:
    """Sends a response; `shared` are headers of every response to this caller, and `cut` closes the connection."""

    def __init__(self, send: Send, shared: Headers, cut: Callable[[], None]) -> None:
        self._send = send
        self._shared = shared
        self.cut = cut
        self.has_begun = False

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head; the body follows."""
        self.has_begun = True
        every = [*headers, _NO_STORE, *self._shared]
        await self._send({"type": "http.response.start", "status": status, "headers": every})

    async def write(self, data: messages.Bytes, *, more: bool) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send(self, status: int, body: bytes, headers: Headers) -> None:
        """Send a whole response."""
        length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]
        await self.begin(status, [*headers, *length])
        await self.write(body, more=False)

    async def refuse(self, problem: RequestProblem, trailing: Headers | None = None) -> None:
        """Send a refusal."""
        body = msgspec.json.encode(http.RefusalBody(problem.code, problem.text))
        headers = [(b"content-type", http.JSON.encode()), *problem.headers, *(trailing or [])]
        await self.send(problem.status, body, headers)
