"""A proxy before an object store, which fails requests as a test orders it."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import threading
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from typing_extensions import override

from support.polling import PATIENCE_S

_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "server", "date"})


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to requests: an error of S3 as the answer, or (status 0) the end of the connection.

    `when` chooses the requests by method and path. With `after` the store has done the work before the answer is lost.
    """

    status: int = 0
    code: str = ""
    when: Callable[[str, str], bool] = lambda method, path: True
    after: bool = False


AWAY = Fault()
SLOW_DOWN = Fault(503, "SlowDown")
INTERNAL = Fault(500, "InternalError")
QUOTA = Fault(403, "QuotaExceeded", lambda method, path: method in ("PUT", "POST"))
NO_SPACE = Fault(507, "InsufficientStorage", lambda method, path: method in ("PUT", "POST"))
LOST_ANSWERS = Fault(when=lambda method, path: method == "PUT", after=True)


class StoreProxy:
    """A listener on loopback that passes requests on to the store."""

    def __init__(self, endpoint: str) -> None:
        self._target = urlsplit(endpoint).netloc
        self._changed = threading.Condition()
        self._fault: Fault | None = None
        self._gate = threading.Event()
        self._gates = [self._gate]
        self._gate.set()
        self._num_failed = 0
        self._num_held = 0
        self.requests: list[str] = []
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def fail(self, fault: Fault | None) -> None:
        """Fail the requests from now on; None: none."""
        with self._changed:
            self._fault, self._num_failed = fault, 0

    def hold(self) -> None:
        """Let requests wait until `release`."""
        self._num_held = 0
        self._gate.clear()

    def release(self) -> None:
        """Pass the requests on that wait."""
        for gate in self._gates:
            gate.set()

    def pass_later(self) -> None:
        """Let the requests wait that wait already, and pass all later ones on."""
        self._gate = threading.Event()
        self._gates.append(self._gate)
        self._gate.set()

    def wait_for_failures(self, count: int) -> None:
        """Return when so many requests have failed since `fail`."""
        self._wait(lambda: self._num_failed >= count)

    def wait_for_held(self, count: int) -> None:
        """Return when so many requests wait since `hold`."""
        self._wait(lambda: self._num_held >= count)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), "gave up waiting for requests to the store"

    def choose_fault(self, method: str, path: str) -> Fault | None:
        """Return what befalls this request, once it may go on."""
        with self._changed:
            self.requests.append(f"{method} {path}")
            gate = self._gate
            if not gate.is_set():
                self._num_held += 1
                self._changed.notify_all()
        gate.wait()
        with self._changed:
            fault = self._fault
            if fault is None or not fault.when(method, path):
                return None
            self._num_failed += 1
            self._changed.notify_all()
            return fault

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> tuple[int, Any, bytes]:
        """Return the status, headers and body of the store's answer."""
        with contextlib.closing(http.client.HTTPConnection(self._target)) as connection:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                connection.putheader(name, value)  # `Host` too, which is signed
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: StoreProxy

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.owner.choose_fault(self.command, self.path)
        if fault is not None and not fault.after:
            self._fail(fault)
            return
        status, headers, content = self.owner.forward(self.command, self.path, self.headers.items(), body)
        if fault is not None:
            self._fail(fault)
            return
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in _HOP or (self.command == "HEAD" and name.lower() == "content-length"):
                self.send_header(name, value)
        if self.command != "HEAD" and status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

    def _fail(self, fault: Fault) -> None:
        self.close_connection = True
        if not fault.status:
            return
        text = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>ordered</Message></Error>".encode()
        self.send_response(fault.status)
        self.send_header("Connection", "close")  # else the client may send its next request on this connection
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    @override
    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the other side is gone
            super().handle()

    @override
    def log_message(self, format: str, *args: object) -> None:
        return


@contextlib.contextmanager
def store_proxy(endpoint: str) -> Generator[StoreProxy]:
    """A proxy that ends with the block."""
    proxy = StoreProxy(endpoint)
    thread = threading.Thread(target=proxy.server.serve_forever, args=(0.05,), name="store proxy")
    thread.start()
    try:
        yield proxy
    finally:
        proxy.release()
        proxy.server.shutdown()
        thread.join()
        proxy.server.server_close()
