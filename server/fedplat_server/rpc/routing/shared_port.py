"""A port that several daemons of one host share (SO_REUSEPORT): the kernel distributes the connections."""

from __future__ import annotations

import contextlib
import socket

from fedplat_server.errors import ConfigError


class PortReservation:
    """An address that this process has bound but does not listen on: it receives no connections yet."""

    def __init__(self, address: str, option: str, *, shared: bool) -> None:
        """Bind the address. Raises `ConfigError` if it is unavailable or, with `shared`, used without sharing."""
        host, _, port = address.rpartition(":")
        try:
            infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, socket_address = infos[0]
            with contextlib.ExitStack() as on_error:
                self._socket = on_error.enter_context(socket.socket(family, kind, protocol))
                # As gRPC does: old connections of a daemon that has ended do not block the port.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
                self._socket.bind(socket_address)
                on_error.pop_all()
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on {address}: {exc.strerror}; choose another with {option} HOST:PORT"
                + (", or run all daemons there with --share-port" if shared else ", one for each daemon")
            ) from exc

    def release(self) -> None:
        """Close the socket."""
        self._socket.close()
