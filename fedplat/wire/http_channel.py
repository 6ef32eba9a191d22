"""A channel of HTTP/1.1 with the interface of gRPC's, for networks that let no gRPC through (see docs/http.md).

The generated stubs work over it. What they would set in a call besides a deadline and metadata is ignored.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc

from fedplat import wire
from fedplat.wire import http as protocol
from fedplat.wire import messages, proxies
from fedplat.wire.http_requests import ConnectionPool, Destination, HttpError, HttpRequest

MAX_WAIT_S = 25.0
"""The longest time for which a call waits at the server: proxies end requests that are silent for a minute, or less."""
_Decode: TypeAlias = Callable[[bytes], Any]


def connect(server: str, *, tls: bool, ca: str = "", proxy: str = "", repeats: bool = True) -> HttpChannel:
    """Open a channel to `host:port`.

    `ca`: the authorities to trust (PEM) instead of those of the platform. `proxy`: its URL, or "none"; by default that
    of the environment. `repeats`: make a call again if its connection was kept, and breaks at once.
    """
    context = None
    if tls:
        context = ssl.create_default_context(cadata=ca or None)
        context.set_alpn_protocols(["http/1.1"])
    found = proxies.find(server, given=proxy)
    usable = found if found is not None and not found.problem else None
    return HttpChannel(Destination(server, context, usable), repeats=repeats)


class HttpChannel:
    """A channel to a server. `unary_unary`, `unary_stream` and `stream_unary` are those of `grpc.Channel`."""

    def __init__(self, destination: Destination, *, repeats: bool = True) -> None:
        self._pool = ConnectionPool(destination, repeats=repeats)

    def __enter__(self) -> HttpChannel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls that are open, and close the connections."""
        self._pool.close()

    @property
    def piece_bytes(self) -> int:
        """The most octets that a request of an upload may have on this way."""
        return self._pool.piece_bytes

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """Return a function that makes calls of a method."""
        return _Unary(self._pool, method, request_serializer or _same, response_deserializer)

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """Return a function that makes calls with several requests.

        The first one of an upload is a header, and the others have the octets.
        """
        if method in protocol.OCTET_METHODS:
            return _Upload(self._pool, method, response_deserializer)
        return _Submission(self._pool, method, request_serializer or _same, response_deserializer)

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """Return a function that makes calls with several responses, the octets of a file or messages."""
        serialize = request_serializer or _same
        is_file = method in protocol.OCTET_METHODS

        def call(request: Any, timeout: float | None = None, metadata: Any = ()) -> _Responses:
            data: bytes = serialize(request)
            if is_file:
                opened = HttpRequest(self._pool, method, [data], timeout, metadata)
                return _Responses(opened, opened.read_parts)
            opened = HttpRequest(self._pool, method, [protocol.enclose(data)], timeout, metadata, protocol.STREAM)
            return _Responses(opened, lambda: map(response_deserializer, opened.read_messages()))

        return call


class _Unary:
    def __init__(self, pool: ConnectionPool, path: str, serialize: Any, decode: _Decode) -> None:
        self._pool, self._path, self._serialize, self._decode = pool, path, serialize, decode

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = (), **_: Any) -> Any:
        return self.future(request, timeout, metadata).result()

    def future(self, request: Any, timeout: float | None = None, metadata: Any = ()) -> _Future:
        data: bytes = self._serialize(request)
        return _Future(HttpRequest(self._pool, self._path, [data], timeout, metadata), self._decode)


class _Upload:
    def __init__(self, pool: ConnectionPool, path: str, decode: _Decode) -> None:
        self._pool, self._path, self._decode = pool, path, decode

    def future(self, requests: Iterator[bytes], timeout: float, metadata: Any) -> _Future:
        first = next(requests)
        parts = [part for each in requests if (part := messages.unframe_field(messages.UPLOAD, each)) is not None]
        return _Future(HttpRequest(self._pool, self._path, parts, timeout, metadata).as_upload(first), self._decode)


class _Submission:
    def __init__(self, pool: ConnectionPool, path: str, serialize: Any, decode: _Decode) -> None:
        self._pool, self._path, self._serialize, self._decode = pool, path, serialize, decode

    def __call__(self, requests: Iterator[Any], timeout: float | None = None, metadata: Any = ()) -> Any:
        body = (protocol.enclose(self._serialize(each)) for each in requests)
        call = HttpRequest(self._pool, self._path, body, timeout, metadata, protocol.STREAM)
        found = list(call.read_messages())
        if len(found) != 1:
            raise HttpError(grpc.StatusCode.INTERNAL, f"the response has {len(found)} messages; expected one")
        return self._decode(found[0])


class _Future:
    """A call that is made when its result is asked for."""

    def __init__(self, call: HttpRequest, decode: _Decode) -> None:
        self._call, self._decode = call, decode

    def result(self) -> Any:
        return self._decode(self._call.read(wire.MAX_MESSAGE_BYTES))

    def cancel(self) -> None:
        self._call.cancel()


class _Responses:
    """An iterator over responses, which begins the call; it may be cancelled by another thread."""

    def __init__(self, call: HttpRequest, begin: Callable[[], Iterator[Any]]) -> None:
        self._call, self._begin = call, begin

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    def cancel(self) -> None:
        self._call.cancel()
        self._call.drop()


def _same(message: bytes) -> bytes:
    return message
