"""A receiver of webhooks in a thread, of the standard library, which accepts every request and can be away."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from typing_extensions import override

from support.ports import free_port


class Inbox:
    """The requests that it has accepted: their headers and bodies."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self._address = ("127.0.0.1", free_port())
        self._server: HTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._address[1]}/hooks"

    def sequences(self) -> set[int]:
        """The numbers of the events."""
        return {json.loads(body)["data"].get("sequence", 0) for _, body in self.requests}

    def start(self) -> None:
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(204)
                self.end_headers()

            @override
            def log_message(self, format: str, *args: object) -> None:
                """Write nothing."""

        self._server = HTTPServer(self._address, Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = None
