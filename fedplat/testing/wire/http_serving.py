"""The scripted server's port of HTTP/1.1, with connections that break where a case breaks them."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

import msgspec
from typing_extensions import override

from fedplat import wire
from fedplat.testing.wire.calls import PATH, STATUSES, RefusedCallError, Request
from fedplat.testing.wire.fleet import ScriptedAnswer, ScriptedFleet
from fedplat.testing.wire.serving import ScriptedServer
from fedplat.wire import auth
from fedplat.wire import http as protocol

_READ_BYTES = 2**18
_IDLE_S = 75.0
_MAX_HEADER_BYTES = 16 * 2**10
_PAGE = b"<html><body>Bad Gateway</body></html>"


class HttpServer(ScriptedServer):
    """Serves a fleet over HTTP/1.1."""

    def __init__(self, fleet: ScriptedFleet, kill: Callable[[], None]) -> None:
        super().__init__(fleet, kill)
        self._listener = _Listener(self)

    @property
    @override
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.server_address[1]}"

    @contextlib.contextmanager
    @override
    def running(self) -> Generator[None]:
        listener = self._listener
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_closing.set()
            listener.shutdown()
            listener.server_close()
            thread.join()


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, scripted: ScriptedServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.scripted = scripted

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that the client has closed."""


def _read_metadata(headers: Mapping[str, str]) -> tuple[dict[str, str | bytes], str]:
    """Return the metadata of a call, and what is wrong with it."""
    found: dict[str, str | bytes] = {}
    misfit = ""
    for name, value in headers.items():
        found[name] = value
        if name.endswith("-bin"):
            try:
                found[name] = protocol.decode_binary(value)
            except ValueError:
                misfit = f"the header {name} is not in base64"
    return found, misfit


def _find_misfit(method: str, headers: Mapping[str, str]) -> str:
    """Return what is wrong with the headers of a call; empty if nothing is."""
    expected = protocol.OCTETS if method == "Upload" else protocol.PROTO
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    if found != expected:
        return f"{method} has the content type {found!r}; expected {expected}"
    if "content-encoding" in headers:
        return f"{method} has a compressed body"
    if method == "Upload" and protocol.UPLOAD_HEADER not in headers:
        return f"{method} has no header {protocol.UPLOAD_HEADER}"
    size = sum(len(name) + len(value) for name, value in headers.items())
    return f"{method} has {size} bytes of headers; at most 16 KiB are accepted" if size > _MAX_HEADER_BYTES else ""


def _encode(refusal: RefusedCallError) -> tuple[int, bytes, list[tuple[str, str]]]:
    """Return the status, the body and the headers of a refusal."""
    headers = [(protocol.TRAILER_PREFIX + auth.METADATA_CODE, refusal.code)]
    if refusal.retry is not None:
        headers.append((protocol.TRAILER_PREFIX + wire.METADATA_RETRY, f"{refusal.retry[0]} {refusal.retry[1]}"))
    status = protocol.STATUSES[STATUSES[refusal.code]]
    body = msgspec.json.encode(protocol.RefusalBody(status.code, f"the conformance kit answers with {refusal.code}"))
    return status.http, body, headers


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    @property
    def _scripted(self) -> ScriptedServer:
        return cast(_Listener, self.server).scripted

    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_OPTIONS(self) -> None:
        """Let web pages of the same machine call."""
        self.send_response(204)
        self._share()
        self.send_header("access-control-allow-methods", "POST")
        asked = self.headers.get("access-control-request-headers", "")
        self.send_header("access-control-allow-headers", asked)
        self.end_headers()

    def do_POST(self) -> None:
        """Serve a call."""
        method = self.path.removeprefix(PATH)
        headers = {name.lower(): value for name, value in self.headers.items()}
        length = headers.get("content-length", "")
        body: bytes | None = b""
        if length.isdecimal():
            body = self._read(int(length), self._scripted.octet_limit(method))
        if body is None:
            return
        metadata, misfit = _read_metadata(headers)
        message, octets = body, b""
        if method == "Upload":
            first = metadata.get(protocol.UPLOAD_HEADER, b"")
            message, octets = first if isinstance(first, bytes) else b"", body
        misfit = misfit or _find_misfit(method, headers)
        if not length.isdecimal():
            misfit, self.close_connection = f"{method[:80]} has no content-length", True
        self._send(self._scripted.take(Request(method, metadata, message, time.monotonic(), octets, misfit)))

    def _read(self, length: int, limit: int | None) -> bytes | None:
        """Return the body, or the part of it after which the connection breaks; None if the client has closed it."""
        size = length if limit is None else min(length, limit)
        parts = bytearray()
        while len(parts) < size:
            data = self.rfile.read(min(size - len(parts), _READ_BYTES))
            if not data:
                self.close_connection = True
                return None
            parts += data
        return bytes(parts)

    def _send(self, answer: ScriptedAnswer) -> None:
        if answer.is_lost:
            self.close_connection = True
            return
        if answer.is_file:
            self._send_file(answer)
            return
        status, kind, body, headers = 200, protocol.PROTO, answer.body, list[tuple[str, str]]()
        if answer.proxy_status:
            status, kind, body = answer.proxy_status, "text/html", _PAGE
        elif answer.refusal is not None:
            status, body, headers = _encode(answer.refusal)
            kind = protocol.JSON
        self._begin(status, kind, [*headers, ("content-length", str(len(body)))])
        self.wfile.write(body)

    def _begin(self, status: int, content_type: str, headers: Sequence[tuple[str, str]]) -> None:
        self.send_response(status)
        self._share()
        for name, value in (("content-type", content_type), ("cache-control", "no-store"), *headers):
            self.send_header(name, value)
        self.end_headers()

    def _send_file(self, answer: ScriptedAnswer) -> None:
        self._begin(200, protocol.OCTETS, [("transfer-encoding", "chunked")])
        body = answer.body if answer.cut_after is None else answer.body[: answer.cut_after]
        for start in range(0, len(body), _READ_BYTES):
            part = body[start : start + _READ_BYTES]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        if answer.cut_after is None:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def _share(self) -> None:
        if origin := self.headers.get("origin"):
            self.send_header("access-control-allow-origin", origin)
            self.send_header("access-control-expose-headers", "trailer-fedplat-code, trailer-fedplat-retry-s")
