"""A proxy that opens tunnels (CONNECT, RFC 9110, section 9.3.6) for a user with a password."""

from __future__ import annotations

import base64
import contextlib
import socket
import threading
from collections.abc import Generator


class ConnectProxy:
    """Counts the tunnels that it opened and the requests that it refused."""

    def __init__(self, user: str, password: str) -> None:
        pair = base64.b64encode(f"{user}:{password}".encode()).decode()
        self._wanted = f"proxy-authorization: basic {pair}".lower()
        self.num_opened = self.num_refused = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []

    @contextlib.contextmanager
    def running(self) -> Generator[ConnectProxy]:
        """Serves within the block."""
        thread = threading.Thread(target=self._accept, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            self._listening.close()
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                self._open.append(caller)
                threading.Thread(target=self._serve, args=[caller], daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (data := caller.recv(1)):
                return
            head += data
        lines = head.decode("latin-1").lower().split("\r\n")
        if self._wanted not in lines:
            self.num_refused += 1
            caller.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            caller.shutdown(socket.SHUT_RDWR)
            return
        self.num_opened += 1
        host, _, port = lines[0].split()[1].rpartition(":")
        server = socket.create_connection((host, int(port)))
        self._open.append(server)
        caller.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        back = threading.Thread(target=_pump, args=[server, caller], daemon=True)
        back.start()
        _pump(caller, server)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)
