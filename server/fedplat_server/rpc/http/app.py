"""The ASGI application: requests become calls of the same handlers as gRPC's, see `fedplat.wire.http`.

Nothing of a body is read before the call is admitted, and what is read is bounded as with gRPC. Methods that stream
messages (watches, and the files of operators) have no form here, and are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, MutableMapping
from typing import Any, NamedTuple, TypeAlias

import grpc
import msgspec
from google.protobuf.descriptor import ServiceDescriptor
from grpc import aio

from fedplat.wire import http, messages
from fedplat.wire.v1 import model_pb2
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.admission import FLEET
from fedplat_server.rpc.http import context
from fedplat_server.rpc.http.context import HttpCall, Receive, Scope
from fedplat_server.rpc.interceptor import Handler

MAX_HEADER_BYTES = 16 * 2**10
"""Maximum bytes of the headers of a request."""
SENT_BYTES = 2**18
"""The octets of a file that are sent at a time. A peer that does not read them within the limit is cut off."""
_UPLOAD, _DOWNLOAD = f"/{FLEET}/Upload", f"/{FLEET}/Download"
_TIMEOUT = re.compile(r"[0-9]{1,10}")
_NO_STORE = (b"cache-control", b"no-store")
_ALLOWED_HEADERS = (
    "content-type, connect-protocol-version, connect-timeout-ms, fedplat-session, fedplat-counter, "
    "fedplat-signature-bin, fedplat-nonce-bin, fedplat-request-bin, traceparent"
)
_EXPOSED_HEADERS = "trailer-fedplat-code, trailer-fedplat-retry-s"
_PREFLIGHT_S = 7200
"""How long browsers may remember that they may call: the longest time that Chromium accepts."""

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_Headers: TypeAlias = list[tuple[bytes, bytes]]


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class _Problem(NamedTuple):
    """A request that is not a call: its status of HTTP, and a sentence."""

    status: int
    text: str
    code: str = "invalid_argument"
    headers: tuple[tuple[bytes, bytes], ...] = ()


_CLOSE = ((b"connection", b"close"),)
_NO_METHOD = _Problem(
    501, "there is no such method over HTTP; operators need the server's --http-operators, or gRPC", "unimplemented"
)


def _list_methods(services: Iterable[ServiceDescriptor]) -> list[str]:
    """Return the paths of the methods that have a form over HTTP: those without streams, and the two of files."""
    paths = [
        f"/{service.full_name}/{method.name}"
        for service in services
        for method in service.methods
        if not (method.client_streaming or method.server_streaming)
    ]
    return [*paths, _UPLOAD, _DOWNLOAD]


class Application:
    """Serves those methods of `services` that have a form here.

    `find` returns their handlers, and `wrap` is that of the interceptor of all calls. `origins` are those of web pages
    that may call from a browser.
    """

    def __init__(
        self,
        services: Iterable[ServiceDescriptor],
        find: Callable[[grpc.HandlerCallDetails], Handler | None],
        wrap: Callable[[Handler, str], Handler],
        origins: Collection[str] = (),
    ) -> None:
        self._methods = frozenset(_list_methods(services))
        self._find = find
        self._wrap = wrap
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        assert scope["type"] == "http"
        headers: dict[bytes, bytes] = dict(scope["headers"])
        shared = self._share(headers)
        response = _Response(send, shared)
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            await _allow(response, is_allowed=headers.get(b"origin", b"").decode("latin-1") in self._origins)
            return
        method = scope["path"]
        problem = _check(scope, headers)
        handler = self._find(_Details(method)) if problem is None and method in self._methods else None
        if handler is None:
            await response.refuse(problem or _NO_METHOD)
            return
        handler = self._wrap(handler, method)
        try:
            call = self._open(scope, headers, receive, handler)
        except context.BadHeaderError as exc:
            await response.refuse(_Problem(400, str(exc)))
            return
        await _Exchange(call, response, scope).run(handler)

    def _share(self, headers: dict[bytes, bytes]) -> _Headers:
        """Return the headers that show a response to a web page, if it is one of those that may call."""
        origin = headers.get(b"origin", b"").decode("latin-1")
        if not self._origins:
            return []
        vary = (b"vary", b"origin")
        if origin not in self._origins:
            return [vary]
        return [
            (b"access-control-allow-origin", origin.encode()),
            (b"access-control-expose-headers", _EXPOSED_HEADERS.encode()),
            vary,
        ]

    def _open(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, handler: Handler) -> HttpCall:
        limit_bytes = interceptor.max_bytes(scope["path"])
        call = HttpCall(scope, receive, handler.request_deserializer, limit_bytes)
        if scope["path"] == _UPLOAD:
            call.begin_upload(context.read_first(scope))
        timeout = headers.get(http.TIMEOUT_HEADER.encode())
        call.limit_time(int(timeout) / 1000.0 if timeout is not None else None)
        return call


def _check(scope: Scope, headers: dict[bytes, bytes]) -> _Problem | None:
    """Return what is wrong with the head of a request."""
    if sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope["raw_path"]) > MAX_HEADER_BYTES:
        return _Problem(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")
    if b"content-length" in headers and b"transfer-encoding" in headers:
        # A proxy may go by the other one, and take the rest for the next request (RFC 9112, section 6.1).
        return _Problem(400, "expected a content-length or a transfer-encoding, not both", headers=_CLOSE)
    if scope["method"] != "POST":
        return _Problem(405, "expected POST: each call is POST /SERVICE/METHOD", headers=((b"allow", b"POST"),))
    expected = http.OCTETS if scope["path"] == _UPLOAD else http.PROTO
    content_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if content_type != expected:
        return _Problem(415, f"the content type of this method is {expected}")
    if headers.get(b"content-encoding", b"identity") != b"identity":
        return _Problem(415, "the body must not be compressed")
    if headers.get(http.VERSION_HEADER.encode(), b"1") != b"1":
        return _Problem(400, f"{http.VERSION_HEADER} must be 1")
    timeout = headers.get(http.TIMEOUT_HEADER.encode(), b"0").decode("latin-1")
    if not _TIMEOUT.fullmatch(timeout):
        return _Problem(400, f"{http.TIMEOUT_HEADER} must be a number of milliseconds, of at most 10 digits")
    return None


async def _allow(response: _Response, *, is_allowed: bool) -> None:
    """Answer the question of a browser whether a page may call."""
    if not is_allowed:
        await response.send(403, b"", [])
        return
    headers = [
        (b"access-control-allow-methods", b"POST"),
        (b"access-control-allow-headers", _ALLOWED_HEADERS.encode()),
        (b"access-control-max-age", str(_PREFLIGHT_S).encode()),
    ]
    await response.send(204, b"", headers)


class _Response:
    """Sends a response; `shared` are headers of every response to this caller."""

    def __init__(self, send: Send, shared: _Headers) -> None:
        self._send = send
        self._shared = shared
        self.has_begun = False

    async def begin(self, status: int, headers: _Headers) -> None:
        self.has_begun = True
        every = [*headers, _NO_STORE, *self._shared]
        await self._send({"type": "http.response.start", "status": status, "headers": every})

    async def write(self, data: messages.Bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def send(self, status: int, body: bytes, headers: _Headers) -> None:
        length = [] if status == 204 else [(b"content-length", str(len(body)).encode())]
        await self.begin(status, [*headers, *length])
        await self.write(body, more=False)

    async def refuse(self, problem: _Problem, trailing: _Headers | None = None) -> None:
        body = msgspec.json.encode(http.RefusalBody(problem.code, problem.text))
        headers = [(b"content-type", http.JSON.encode()), *problem.headers, *(trailing or [])]
        await self.send(problem.status, body, headers)


class _Exchange:
    """A call and its response."""

    def __init__(self, call: HttpCall, response: _Response, scope: Scope) -> None:
        self._call = call
        self._response = response
        self._is_download = scope["path"] == _DOWNLOAD
        self._cut: Callable[[], None] = scope["extensions"]["fedplat.cut"]

    async def run(self, handler: Handler) -> None:
        """Call the handler and send its response; end without one if the caller is gone."""
        call, task = self._call, asyncio.current_task()
        try:
            await self._answer(handler)
        except asyncio.CancelledError:
            if not call.is_gone:
                raise
            if task is not None and task.cancelling():
                task.uncancel()
        finally:
            await call.end()

    async def _answer(self, handler: Handler) -> None:
        call = self._call
        try:
            async with asyncio.timeout(call.time_remaining()):
                if self._is_download:
                    await self._send_file(handler)
                    return
                body = await self._ask(handler)
        except aio.AbortError:
            await self._refuse(call.code().name, call.details)
        except TimeoutError:
            await self._refuse("DEADLINE_EXCEEDED", "the caller's time is over")
        else:
            await self._response.send(200, body, [(b"content-type", http.PROTO.encode()), *_trailers(call)])

    async def _ask(self, handler: Handler) -> bytes:
        """Return the only message of a response."""
        if handler.response_streaming:  # a gateway forwards all methods as streams
            async with contextlib.aclosing(handler.stream_stream(None, self._call)) as responses:
                return b"".join([each async for each in responses])
        message = await handler.stream_unary(None, self._call)
        return handler.response_serializer(message) if handler.response_serializer is not None else message

    async def _send_file(self, handler: Handler) -> None:
        response = self._response
        stream: AsyncGenerator[bytes] = handler.stream_stream(None, self._call)
        async with contextlib.aclosing(stream):
            async for message in stream:
                if not response.has_begun:
                    await response.begin(200, [(b"content-type", http.OCTETS.encode())])
                data = messages.unframe_field(messages.CHUNK, message)
                data = memoryview(model_pb2.Chunk.FromString(message).data) if data is None else data
                for start in range(0, len(data), SENT_BYTES):
                    await response.write(data[start : start + SENT_BYTES], more=True)
        if not response.has_begun:
            await response.begin(200, [(b"content-type", http.OCTETS.encode())])
        await response.write(b"", more=False)

    async def _refuse(self, name: str, text: str) -> None:
        if self._response.has_begun:  # the caller must see that the file is incomplete
            self._cut()
            await asyncio.Event().wait()  # the end of the connection cancels this task
        status = http.STATUSES[name]
        await self._response.refuse(_Problem(status.http, text, status.code), _trailers(self._call))


def _trailers(call: HttpCall) -> _Headers:
    return [
        (f"{http.TRAILER_PREFIX}{key}".encode(), http.encode_value(value).encode())
        for key, value in call.trailing
        if key.startswith("fedplat-")
    ]
