"""A port that several daemons of one host listen on together (SO_REUSEPORT): the kernel deals connections out."""

from __future__ import annotations

import socket

from fedplat_server.errors import ConfigError


class PortReservation:
    """An address that this process has, without listening there: no connection comes to it yet."""

    def __init__(self, address: str, option: str, *, shared: bool) -> None:
        """Raises `ConfigError` if the address cannot be had: not at all, or not together with others."""
        host, _, port = address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, where = found[0]
            self._socket = socket.socket(family, kind, protocol)
            # As gRPC does it: connections of a daemon that has ended do not keep the port.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
            self._socket.bind(where)
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on {address}: {exc.strerror}; choose another with {option} HOST:PORT"
                + (", or run all daemons there with --share-port" if shared else ", one for each daemon")
            ) from exc

    def release(self) -> None:
        """Gives it up."""
        self._socket.close()
