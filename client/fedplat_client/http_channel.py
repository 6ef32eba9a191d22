"""Calls over HTTP/1.1 with the interface of a gRPC channel, for networks that let no gRPC through (see docs/http.md).

A call runs in the thread that asks for its result; another thread may cancel it, which closes its connection.
Connections are kept for the next call.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import grpc
import msgspec

from fedplat import wire
from fedplat.config.decoding import prepare_type
from fedplat.wire import http as protocol
from fedplat.wire import messages, proxies

MAX_WAIT_S = 25.0
"""The longest time for which a call waits at the server: proxies end requests that are silent for a minute, or less."""
PIECE_BYTES = 8 * 2**20
SMALL_PIECE_BYTES = 512 * 2**10
"""The octets of one request of an upload: after the refusal of a proxy, less than the usual limit of 1 MiB."""
_CONNECT_S = 10.0
_IDLE_S = 55.0
"""How long a connection is kept: less than servers and proxies keep theirs."""
_STALE_S = 1.0
"""A kept connection that breaks within this time was closed while it was idle: the call is made again."""
_READ_BYTES = 2**18
_TOO_LARGE = 413


class _Trailer(NamedTuple):
    key: str
    value: str


class HttpError(grpc.RpcError):
    """A call that failed, with what gRPC's errors have. `status` is that of HTTP; 0: there was no response."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Iterable[_Trailer] = (), status: int = 0) -> None:
        super().__init__(details)
        self._code, self._details, self._trailing = code, details, tuple(trailing)
        self.status = status

    def code(self) -> grpc.StatusCode:
        """Return the status of gRPC."""
        return self._code

    def details(self) -> str:
        """Return the text."""
        return self._details

    def trailing_metadata(self) -> Any:
        """Return the metadata with the error code and the retry window."""
        return self._trailing


class Destination(NamedTuple):
    """A server and the way to it: `tls` is None without TLS, and `proxy` without a proxy."""

    server: str
    tls: ssl.SSLContext | None
    proxy: proxies.Proxy | None


def make_context(ca: str) -> ssl.SSLContext:
    """Return a context that trusts these certificates (PEM) or, without any, those of the platform."""
    context = ssl.create_default_context(cadata=ca or None)
    context.set_alpn_protocols(["http/1.1"])
    return context


class HttpChannel:
    """A channel to a server. `unary_unary`, `unary_stream` and `stream_unary` are those of `grpc.Channel`."""

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._open: set[_Call] = set()
        self._is_closed = False
        self._lock = threading.Lock()
        self.piece_bytes = PIECE_BYTES

    def __enter__(self) -> HttpChannel:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the calls that are open, and close the connections that are kept."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            open_calls = list(self._open)
        for call in open_calls:
            call.cancel()
        for _, connection in idle:
            connection.close()

    def unary_unary(self, method: str, /, *, response_deserializer: Callable[[bytes], Any]) -> Any:
        """Return a function that makes calls of a method."""
        return _Unary(self, method, response_deserializer)

    def stream_unary(self, method: str, /, *, response_deserializer: Callable[[bytes], Any]) -> Any:
        """Return a function that uploads: the first message is a header, and the others have the octets."""
        return _Upload(self, method, response_deserializer)

    def unary_stream(self, method: str, /, *, response_deserializer: object = None) -> Any:
        """Return a function that downloads the octets of a file."""

        def call(request: bytes, timeout: float, metadata: Any) -> _Download:
            return _Download(_Call(self, method, request, timeout, metadata))

        return call

    def begin(self, call: _Call) -> None:
        """Note that a call is open."""
        with self._lock:
            self._open.add(call)

    def end(self, call: _Call) -> None:
        """Note that a call is not open any more."""
        with self._lock:
            self._open.discard(call)

    def acquire(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it was used before."""
        oldest = time.monotonic() - _IDLE_S
        with self._lock:
            while self._idle:
                since, connection = self._idle.pop()
                if since >= oldest:
                    return connection, True
                connection.close()
        return self._connect(), False

    def release(self, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose response was read to its end."""
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append((time.monotonic(), connection))
        if not is_kept:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        server, tls, proxy = self._destination
        host, _, port = server.rpartition(":")
        host = host.strip("[]")
        first = (host, int(port))
        if proxy is not None:
            place = urlsplit(proxy.url)
            first = (place.hostname or "", place.port or 80)
        connection = (
            http.client.HTTPConnection(*first, timeout=_CONNECT_S)
            if tls is None
            else http.client.HTTPSConnection(*first, timeout=_CONNECT_S, context=tls)
        )
        if proxy is not None:
            connection.set_tunnel(host, int(port), _authorize(proxy))
        return connection


def _authorize(proxy: proxies.Proxy) -> dict[str, str]:
    place = urlsplit(proxy.url)
    if place.username is None:
        return {}
    pair = f"{unquote(place.username)}:{unquote(place.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


class _Call:
    """One request and its response."""

    def __init__(self, channel: HttpChannel, path: str, body: Any, timeout: float, metadata: Any) -> None:
        self._channel = channel
        self._path = path
        self._body: list[messages.Bytes] = body if isinstance(body, list) else [body]
        self._ends_at = time.monotonic() + timeout
        self._headers = {
            "content-type": protocol.PROTO,
            "content-length": str(sum(map(len, self._body))),
            protocol.VERSION_HEADER: "1",
            protocol.TIMEOUT_HEADER: str(min(int(1000 * timeout), 10**10 - 1)),
            **{name: protocol.encode_value(value) for name, value in metadata},
        }
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False

    def as_upload(self, first: bytes) -> _Call:
        """Make this the request of an upload with that first message."""
        self._headers |= {"content-type": protocol.OCTETS, protocol.UPLOAD_HEADER: protocol.encode_value(first)}
        return self

    def cancel(self) -> None:
        """Close the connection, at which the thread that waits gets an error."""
        with self._lock:
            self._is_cancelled = True
            connection = self._connection
        opened = connection.sock if connection is not None else None
        if opened is not None:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def open(self) -> http.client.HTTPResponse:
        """Send the request; return a response that is a success. Raises `HttpError`."""
        while True:
            began = time.monotonic()
            self._channel.begin(self)
            with self._translate_errors():
                connection, was_used = self._channel.acquire()
            try:
                return self._exchange(connection)
            except HttpError as exc:
                if not was_used or exc.status or self._is_cancelled or time.monotonic() - began > _STALE_S:
                    raise

    def _exchange(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        with self._lock:
            self._connection = connection
        try:
            with self._translate_errors():
                response = self._request(connection)
            if response.status != 200 or not _has_content(response, (protocol.PROTO, protocol.OCTETS)):
                raise self._read_error(response)
            return response
        except BaseException:
            self.drop()
            raise

    def _request(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        opened: socket.socket | None = connection.sock
        if opened is None:
            connection.timeout = min(_CONNECT_S, self._remaining_s())
            connection.connect()
            opened = connection.sock
            assert opened is not None
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._check()
        opened.settimeout(self._remaining_s())
        try:
            connection.request("POST", self._path, iter(self._body), self._headers)
        except (BrokenPipeError, ConnectionResetError):
            # It may have answered before it had the whole body. http.client does not read that by itself.
            return _read_early(connection)
        return connection.getresponse()

    def read(self, limit_bytes: int) -> bytes:
        """Return the body of the response. Raises `HttpError`."""
        response = self.open()
        with self._translate_errors():
            data = response.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            self.drop()
            raise HttpError(_S.RESOURCE_EXHAUSTED, f"the response has more than {limit_bytes} bytes")
        self.finish()
        return data

    def read_parts(self) -> Iterator[memoryview]:
        """Yield the body of the response in parts. Raises `HttpError`, also if it is incomplete."""
        response = self.open()
        while True:
            with self._translate_errors():
                if self._connection is not None and self._connection.sock is not None:
                    self._connection.sock.settimeout(self._remaining_s())
                data = response.read1(_READ_BYTES)
                if not data and not response.isclosed():
                    raise http.client.IncompleteRead(b"")
            if not data:
                self.finish()
                return
            yield memoryview(data)

    def finish(self) -> None:
        """Keep the connection: its response was read to its end."""
        with self._lock:
            connection, self._connection = self._connection, None
        self._channel.end(self)
        if connection is not None and connection.sock is not None:
            self._channel.release(connection)

    def drop(self) -> None:
        """Close the connection."""
        with self._lock:
            connection, self._connection = self._connection, None
        self._channel.end(self)
        if connection is not None:
            connection.close()

    def _check(self) -> None:
        if self._is_cancelled:
            raise HttpError(_S.CANCELLED, "the call was cancelled")

    def _remaining_s(self) -> float:
        remaining_s = self._ends_at - time.monotonic()
        if remaining_s <= 0.0:
            raise TimeoutError
        return remaining_s

    @contextlib.contextmanager
    def _translate_errors(self) -> Generator[None]:
        try:
            yield
        except TimeoutError as exc:
            self.drop()
            if time.monotonic() >= self._ends_at:
                raise HttpError(_S.DEADLINE_EXCEEDED, "there was no answer in time") from exc
            raise HttpError(_S.UNAVAILABLE, f"failed to connect within {_CONNECT_S:g} s") from exc
        except (OSError, http.client.HTTPException) as exc:
            self.drop()
            self._check()
            raise HttpError(_S.UNAVAILABLE, _describe(exc)) from exc

    def _read_error(self, response: http.client.HTTPResponse) -> HttpError:
        """Return the error of a response that is not a success; it may come from something before the server."""
        with self._translate_errors():
            data = response.read(protocol.MAX_REFUSAL_BYTES)
        prefix = protocol.TRAILER_PREFIX
        trailing = [
            _Trailer(name.lower().removeprefix(prefix), value)
            for name, value in response.getheaders()
            if name.lower().startswith(prefix)
        ]
        if response.status != 200 and _has_content(response, (protocol.JSON,)):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, KeyError):
                said = msgspec.json.decode(data, type=prepare_type(protocol.RefusalBody))
                return HttpError(_S[protocol.NAMES[said.code]], said.message, trailing, response.status)
        if response.status == _TOO_LARGE:
            self._channel.piece_bytes = SMALL_PIECE_BYTES
        details = proxies.explain_http(response.status)
        return HttpError(_S.UNAVAILABLE, details, status=response.status)


def _read_early(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(connection.sock, method="POST")
    response.begin()
    if response.status == 200:
        raise ConnectionResetError
    return response


def _has_content(response: http.client.HTTPResponse, kinds: tuple[str, ...]) -> bool:
    return (response.getheader("content-type") or "").partition(";")[0].strip().lower() in kinds


def _describe(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"failed to connect: the certificate is not trusted ({exc.verify_message})"
    if isinstance(exc, socket.gaierror):
        return "lookup failed"
    if isinstance(exc, ConnectionRefusedError):
        return "failed to connect: connection refused"
    return proxies.explain_tunnel(str(exc)) or "the connection was closed"


class _Unary:
    def __init__(self, channel: HttpChannel, path: str, decode: Callable[[bytes], Any]) -> None:
        self._channel, self._path, self._decode = channel, path, decode

    def future(self, request: bytes, timeout: float, metadata: Any) -> _Future:
        return _Future(_Call(self._channel, self._path, request, timeout, metadata), self._decode)


class _Upload:
    def __init__(self, channel: HttpChannel, path: str, decode: Callable[[bytes], Any]) -> None:
        self._channel, self._path, self._decode = channel, path, decode

    def future(self, requests: Iterator[bytes], timeout: float, metadata: Any) -> _Future:
        first = next(requests)
        parts = [part for each in requests if (part := messages.unframe_field(messages.UPLOAD, each)) is not None]
        return _Future(_Call(self._channel, self._path, parts, timeout, metadata).as_upload(first), self._decode)


class _Future:
    """A call that is made when its result is asked for."""

    def __init__(self, call: _Call, decode: Callable[[bytes], Any]) -> None:
        self._call, self._decode = call, decode

    def result(self) -> Any:
        return self._decode(self._call.read(wire.MAX_MESSAGE_BYTES))

    def cancel(self) -> None:
        self._call.cancel()


class _Download:
    """An iterator over the octets of a file; it may be cancelled by another thread."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __iter__(self) -> Iterator[memoryview]:
        return self._call.read_parts()

    def cancel(self) -> None:
        self._call.cancel()
        self._call.drop()


_S = grpc.StatusCode
