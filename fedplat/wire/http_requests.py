"""Calls over HTTP/1.1: requests, their responses, and the connections that they take.

A call runs in the thread that asks for its result; another thread may cancel it, which closes its connection.
Connections are kept for the next call.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import math
import socket
import ssl
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

import grpc
import msgspec

from fedplat import wire
from fedplat.config.decoding import prepare_type
from fedplat.wire import http as protocol
from fedplat.wire import messages, proxies

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
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 2}
"""A watch may be silent for hours; these times, as with gRPC, detect whether the server is still reachable."""
_Body: TypeAlias = Sequence[messages.Bytes] | Iterator[bytes]
"""The parts of a request's body; those of an iterator can be sent once, and have a length that is not known before."""
_S = grpc.StatusCode
_SUCCESS = (protocol.PROTO, protocol.OCTETS, protocol.STREAM)


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


class ConnectionPool:
    """The connections to a server, and the calls that are open.

    With `repeats`, a call is made again if its connection was used before and breaks at once. The server may have
    received it nevertheless, so this is for calls that may be repeated.
    """

    def __init__(self, destination: Destination, *, repeats: bool) -> None:
        self._destination = destination
        self.repeats = repeats
        self.piece_bytes = PIECE_BYTES
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._open: set[HttpRequest] = set()
        self._is_closed = False
        self._lock = threading.Lock()

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

    def begin(self, call: HttpRequest) -> None:
        """Note that a call is open. A pool that is closed cancels it."""
        with self._lock:
            self._open.add(call)
            is_closed = self._is_closed
        if is_closed:
            call.cancel()

    def end(self, call: HttpRequest) -> None:
        """Note that a call is not open any more."""
        with self._lock:
            self._open.discard(call)

    def acquire(self, *, is_new: bool) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it was used before; if `is_new`, it was not."""
        oldest = time.monotonic() - _IDLE_S
        with self._lock:
            while self._idle and not is_new:
                since, connection = self._idle.pop()
                if since >= oldest and _is_open(connection.sock):
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


def _is_open(kept: socket.socket) -> bool:
    """Return whether a connection without a call has neither ended nor received anything."""
    kept.settimeout(0.0)
    try:
        socket.socket.recv(kept, 1, socket.MSG_PEEK)  # that of TLS has no flags
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _authorize(proxy: proxies.Proxy) -> dict[str, str]:
    place = urlsplit(proxy.url)
    if place.username is None:
        return {}
    pair = f"{unquote(place.username)}:{unquote(place.password or '')}"
    return {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}


class HttpRequest:
    """One request and its response."""

    def __init__(
        self,
        pool: ConnectionPool,
        path: str,
        body: _Body,
        timeout: float | None,
        metadata: Any,
        content_type: str = protocol.PROTO,
    ) -> None:
        self._pool = pool
        self._path = path
        self._body = body
        self._ends_at = math.inf if timeout is None else time.monotonic() + timeout
        self._headers = {
            "content-type": content_type,
            protocol.VERSION_HEADER: "1",
            **{name: protocol.encode_value(value) for name, value in metadata or ()},
        }
        if isinstance(body, Sequence):
            self._headers["content-length"] = str(sum(map(len, body)))
        if timeout is not None:
            self._headers[protocol.TIMEOUT_HEADER] = str(min(int(1000 * timeout), 10**10 - 1))
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()
        self._is_cancelled = False

    def as_upload(self, first: bytes) -> HttpRequest:
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
            self._pool.begin(self)
            with self._translate_errors():
                connection, was_used = self._pool.acquire(is_new=not isinstance(self._body, Sequence))
            try:
                return self._exchange(connection)
            except HttpError as exc:
                is_stale = was_used and not exc.status and time.monotonic() - began <= _STALE_S
                if not is_stale or self._is_cancelled or not self._pool.repeats:
                    raise

    def _exchange(self, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        with self._lock:
            self._connection = connection
        try:
            with self._translate_errors():
                response = self._request(connection)
            if response.status != 200 or not _has_content(response, _SUCCESS):
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
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if (option := getattr(socket, name, None)) is not None:
                    opened.setsockopt(socket.IPPROTO_TCP, option, value)
        self._check()
        opened.settimeout(self._find_timeout_s())
        try:
            # An iterator without a length is sent in chunks.
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
            if response.length and len(data) <= limit_bytes:  # http.client returns what came before the end
                raise http.client.IncompleteRead(data, response.length)
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
                self._renew_timeout()
                data = response.read1(_READ_BYTES)
                if not data and not response.isclosed():
                    raise http.client.IncompleteRead(b"")
            if not data:
                self.finish()
                return
            yield memoryview(data)

    def read_messages(self) -> Iterator[bytes]:
        """Yield the messages of the response. Raises `HttpError`, also if it is incomplete."""
        response = self.open()
        while True:
            with self._translate_errors():
                flags, data = self._read_envelope(response)
            if flags == protocol.LAST:
                break
            yield data
        with self._translate_errors():
            response.read()
        self.finish()
        try:
            last = msgspec.json.decode(data, type=prepare_type(protocol.LastEnvelope))
            status = _S[protocol.NAMES[last.error.code]] if last.error is not None else _S.OK
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError) as exc:
            raise HttpError(_S.INTERNAL, "the end of the response is not valid", status=response.status) from exc
        if last.error is not None:
            trailing = [_Trailer(name.lower(), values[0]) for name, values in last.metadata.items() if values]
            raise HttpError(status, last.error.message, trailing, response.status)

    def _read_envelope(self, response: http.client.HTTPResponse) -> tuple[int, bytes]:
        self._renew_timeout()
        head = response.read(protocol.HEAD_BYTES)
        if len(head) < protocol.HEAD_BYTES:
            raise http.client.IncompleteRead(head)
        flags, size = protocol.read_head(head)
        if size > wire.MAX_MESSAGE_BYTES:
            raise HttpError(_S.RESOURCE_EXHAUSTED, f"a message has more than {wire.MAX_MESSAGE_BYTES} bytes")
        data = response.read(size)
        if len(data) < size:
            raise http.client.IncompleteRead(data)
        return flags, data

    def _renew_timeout(self) -> None:
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.settimeout(self._find_timeout_s())

    def finish(self) -> None:
        """Keep the connection: its response was read to its end."""
        with self._lock:
            connection, self._connection = self._connection, None
        self._pool.end(self)
        if connection is not None and connection.sock is not None:
            self._pool.release(connection)

    def drop(self) -> None:
        """Close the connection."""
        with self._lock:
            connection, self._connection = self._connection, None
        self._pool.end(self)
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

    def _find_timeout_s(self) -> float | None:
        """Return the time that is left, for a socket."""
        remaining_s = self._remaining_s()
        return None if remaining_s == math.inf else remaining_s

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
            self._pool.piece_bytes = SMALL_PIECE_BYTES
        details = proxies.explain_http(response.status, data)
        return HttpError(_S.UNAVAILABLE, details, status=response.status)


def _read_early(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(connection.sock, method="POST")
    response.begin()
    if response.status == 200 and not _has_content(response, (protocol.STREAM,)):
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
    is_unreadable = isinstance(exc, http.client.BadStatusLine) and not isinstance(exc, ConnectionError)
    if is_unreadable or "NO_APPLICATION_PROTOCOL" in str(exc):
        return "what answers there does not speak HTTP/1.1: it may be the server's port of gRPC"
    return proxies.explain_tunnel(str(exc)) or "the connection was closed"
