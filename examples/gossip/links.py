"""The outgoing links of the silos: an HTTP proxy for each, which counts bytes and can cut the way to an address.

gRPC connects through the proxy that the environment variable `grpc_proxy` names (HTTP CONNECT). So each silo's links
are known by the port at which they come in, and the other end by the address that the silo asks for. Nothing is
decrypted.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter

_PART_BYTES = 2**16
_MAX_REQUEST_BYTES = 8192


class Link:
    """The proxy of one silo: it forwards connections to any address that is not cut."""

    def __init__(self) -> None:
        self.sent = Counter[str]()
        self.received = Counter[str]()
        self._cut = frozenset[str]()
        self._lock = threading.Lock()
        self._open: dict[str, set[socket.socket]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    @property
    def url(self) -> str:
        """The value of `grpc_proxy`."""
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self, *addresses: str) -> None:
        """Cut the way to these addresses only: break their connections, and refuse new ones."""
        with self._lock:
            self._cut = frozenset(addresses)
            broken = [each for address in addresses for each in self._open.get(address, ())]
        for each in broken:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), name="link", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection: read the CONNECT request, and forward in both directions."""
        with connection, contextlib.suppress(OSError, ValueError):
            address = _read_target(connection)
            with self._lock:
                is_cut = address in self._cut
            if is_cut:
                connection.sendall(b"HTTP/1.1 503 The link is cut\r\n\r\n")
                return
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port))) as other:
                with self._lock:
                    self._open.setdefault(address, set()).add(other)
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                    back = threading.Thread(target=self._copy, args=(other, connection, self.received, address))
                    back.start()
                    self._copy(connection, other, self.sent, address)
                    back.join()
                finally:
                    with self._lock:
                        self._open[address].discard(other)

    def _copy(self, source: socket.socket, target: socket.socket, count: Counter[str], address: str) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(_PART_BYTES):
                with self._lock:
                    count[address] += len(part)
                target.sendall(part)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def _read_target(connection: socket.socket) -> str:
    """Return the address of a CONNECT request. Raises `ValueError` for another request."""
    request = b""
    while b"\r\n\r\n" not in request:
        part = connection.recv(_MAX_REQUEST_BYTES)
        request += part
        if not part or len(request) > _MAX_REQUEST_BYTES:
            raise ValueError("the request has no end")
    method, target, _ = request.split(b"\r\n", 1)[0].decode().split(" ", 2)
    if method != "CONNECT":
        raise ValueError(f"the method is {method}; expected CONNECT")
    return target
