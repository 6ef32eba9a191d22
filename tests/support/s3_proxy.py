"""A proxy before an S3 server that may answer writes as a full store does."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import threading
from collections.abc import Generator
from typing import Any, cast

FULL = b"<?xml version='1.0'?><Error><Code>InsufficientStorage</Code><Message>The disk is full</Message></Error>"


class S3Proxy(http.server.ThreadingHTTPServer):
    """With `is_full` every PUT and POST is answered by 507; all other requests are passed on."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target.removeprefix("http://")
        self.is_full = False

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle_one_request()

    def _pass_on(self) -> None:
        server = cast(S3Proxy, self.server)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if server.is_full and self.command in ("PUT", "POST"):
            self._answer(507, {}, FULL)
            return
        connection = http.client.HTTPConnection(server.target)
        # With the headers as they came: the signature covers the name of this host.
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        with contextlib.closing(connection), connection.getresponse() as answer:
            self._answer(answer.status, dict(answer.getheaders()), answer.read())

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        length = headers.pop("Content-Length", str(len(body)))
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        self.send_header("content-length", length)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def log_message(self, format: str, *args: Any) -> None:
        return


@contextlib.contextmanager
def s3_proxy(target: str) -> Generator[S3Proxy]:
    """A proxy that ends with the block."""
    with S3Proxy(target) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), name="S3 proxy")
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()
