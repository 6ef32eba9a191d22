"""The port of the scripted server: HTTP/1.1 on the loopback, with connections that break where a case breaks them."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from typing_extensions import override

from fedplat.testing.wire.calls import PATH, Request
from fedplat.testing.wire.fleet import ScriptedAnswer, ScriptedFleet
from fedplat.wire import http as protocol

_READ_BYTES = 2**18
_IDLE_S = 75.0
_HELD_S = 2.0
"""How long an answer is held back at most: a case must not take longer."""


class ScriptedServer(http.server.ThreadingHTTPServer):
    """Serves a fleet. `changed` is notified after each call; `kill` ends the client's process at once."""

    daemon_threads = True

    def __init__(self, fleet: ScriptedFleet, kill: Callable[[], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.fleet = fleet
        self.kill = kill
        self.changed = threading.Condition()
        self.is_closing = threading.Event()

    @property
    def address(self) -> str:
        """Its `host:port`."""
        return f"127.0.0.1:{self.server_address[1]}"

    @contextlib.contextmanager
    def running(self) -> Any:
        """Serve within the block."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.is_closing.set()
            self.shutdown()
            self.server_close()
            thread.join()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of connections that the client has closed."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    @property
    def _scripted(self) -> ScriptedServer:
        return cast(ScriptedServer, self.server)

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
        fleet, changed = self._scripted.fleet, self._scripted.changed
        method = self.path.removeprefix(PATH)
        length = self.headers.get("content-length", "")
        if not length.isdecimal():
            self._note(f"{method[:80]} has no content-length")
            self._send(ScriptedAnswer(status=411, content_type="text/plain"))
            return
        with changed:
            limit = fleet.body_limit(method)
        body = self._read(int(length), limit)
        if body is None:
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        with changed:
            answer = fleet.take(Request(method, headers, body, time.monotonic()))
            if answer.kills:
                self._scripted.kill()
            changed.notify_all()
        if answer.hold_s:
            self._scripted.is_closing.wait(min(answer.hold_s, _HELD_S))
        self._send(answer)

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

    def _note(self, problem: str) -> None:
        with self._scripted.changed:
            self._scripted.fleet.problems.append(problem)
            self._scripted.changed.notify_all()

    def _send(self, answer: ScriptedAnswer) -> None:
        if answer.is_lost:
            self.close_connection = True
            return
        is_file = answer.content_type == protocol.OCTETS
        self.send_response(answer.status)
        self._share()
        self.send_header("content-type", answer.content_type)
        self.send_header("cache-control", "no-store")
        for name, value in answer.headers:
            self.send_header(name, value)
        if is_file:
            self.send_header("transfer-encoding", "chunked")
        else:
            self.send_header("content-length", str(len(answer.body)))
        self.end_headers()
        if not is_file:
            self.wfile.write(answer.body)
            return
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
