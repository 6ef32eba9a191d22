"""A call over HTTP as handlers see it: the context that gRPC would give them, over an ASGI request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Never, Protocol, TypeAlias

import grpc
from grpc import aio
from typing_extensions import override

from fedplat.wire import http
from fedplat_server import errors
from fedplat_server.auth import addresses
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.context import ServedCall

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
_METADATA = ("authorization", addresses.FORWARDED, "traceparent", "tracestate")
"""Metadata besides those of the protocol, which begin with `fedplat-`."""


class BadHeaderError(ValueError):
    """A header of a request cannot be used."""


def read_metadata(scope: Scope) -> list[tuple[str, str | bytes]]:
    """Return the headers that are metadata. Raises `BadHeaderError`.

    Those with which gateways forward calls are left out: only daemons may send them, and they use gRPC.
    """
    found: list[tuple[str, str | bytes]] = []
    for key, value in scope["headers"]:
        name = key.decode("latin-1")
        if name == http.UPLOAD_HEADER or name.startswith(addresses.PREFIX):
            continue
        if name.startswith("fedplat-") or name in _METADATA:
            if name.startswith("fedplat-") and any(name == each for each, _ in found):
                raise BadHeaderError(f"the header {name} occurs twice")
            text = value.decode("latin-1")
            if not (text.isascii() and text.isprintable()):
                raise BadHeaderError(f"the header {name} has characters other than printable ASCII")
            found.append((name, _decode(name, text) if name.endswith("-bin") else text))
    return found


def read_first(scope: Scope) -> bytes:
    """Return the first message of an upload, from its header. Raises `BadHeaderError`."""
    values = [value for key, value in scope["headers"] if key == http.UPLOAD_HEADER.encode()]
    if len(values) != 1:
        raise BadHeaderError(f"an upload needs one header {http.UPLOAD_HEADER}, with the message that is signed")
    return _decode(http.UPLOAD_HEADER, values[0].decode("latin-1"))


def _decode(name: str, text: str) -> bytes:
    try:
        return http.decode_binary(text)
    except ValueError as exc:
        raise BadHeaderError(f"the header {name} is not base64") from exc


class RequestBody:
    """The body of a request. Once it is complete, its task is cancelled as soon as the caller is gone.

    `take` returns parts that the connection has kept, which precede what is received next.
    """

    def __init__(self, receive: Receive, take: Callable[[], list[bytes]]) -> None:
        self._receive = receive
        self._take = take
        self._task = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None
        self.more = True
        """Whether more of it follows."""
        self.is_gone = False
        """Whether the caller has closed the connection."""

    async def receive(self) -> list[bytes]:
        """Return the next parts, maybe none."""
        event = await self._receive()
        if event["type"] == "http.disconnect":
            self.is_gone = True
            raise asyncio.CancelledError
        self.more = event.get("more_body", False)
        if not self.more:
            self._watch = asyncio.create_task(self._wait_until_gone(), name="HTTP caller")
        parts = self._take()
        if body := event.get("body", b""):
            parts.append(body)
        return parts

    async def _wait_until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_gone = True
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """End the wait for the end of the caller."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch


class IncomingMessages(Protocol):
    """The serialized messages of a request."""

    async def next(self) -> bytes | None:
        """Return the next message; None at the end. Raises `RefusedError`."""
        ...


class HttpCall(ServedCall):
    """A call with these messages. `decode` is the handler's deserializer."""

    def __init__(self, scope: Scope, found: IncomingMessages, decode: Callable[[bytes], Any]) -> None:
        """Read the metadata. Raises `BadHeaderError`."""
        host, port = scope["client"] or ("", 0)
        self._peer = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
        self._metadata = read_metadata(scope)
        self._messages = found
        self._decode = decode
        self._code: grpc.StatusCode | None = None
        self._callbacks: list[Callable[[Any], object]] = []
        self._ends_at: float | None = None
        self._trailing: Sequence[tuple[str, str | bytes]] = ()
        self.details = ""

    def limit_time(self, seconds: float | None) -> None:
        """Set the caller's deadline."""
        self._ends_at = None if seconds is None else asyncio.get_running_loop().time() + seconds

    @override
    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata

    @override
    def peer(self) -> str:
        return self._peer

    @override
    def auth_context(self) -> dict[str, Any]:
        return {}

    @override
    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(self._ends_at - asyncio.get_running_loop().time(), 0.0)

    @override
    def code(self) -> grpc.StatusCode:
        return self._code  # type: ignore[return-value]  # pyright: ignore[reportReturnType] -- as gRPC's before the end

    @override
    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    @override
    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        pass  # for gateways only, which use gRPC

    @override
    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = trailing_metadata

    def list_trailers(self) -> list[tuple[str, str]]:
        """Return the trailing metadata of the protocol, as headers have them."""
        return [(key, http.encode_value(value)) for key, value in self._trailing if key.startswith("fedplat-")]

    @override
    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Never:
        self._code, self.details, self._trailing = code, details, trailing_metadata
        raise aio.AbortError

    @override
    async def read(self) -> Any:
        try:
            message = await self._messages.next()
        except errors.RefusedError as exc:
            return interceptor.ReceivedMessage(None, b"", exc)
        return aio.EOF if message is None else self._decode(message)

    def end(self) -> None:
        """Count the call as ended."""
        for callback in self._callbacks:
            callback(self)
