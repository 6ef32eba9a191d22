"""Serves the app with uvicorn, on a socket that is bound before, so that its port is known and errors are clear."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Callable, Generator

import uvicorn
from typing_extensions import override

from fedplat import http_connections
from fedplat.dashboard.app import Dashboard
from fedplat.errors import FedplatError
from fedplat.http_connections import ConnectionLimits

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
STOP_S = 1
"""Seconds for requests in progress when the process ends; streams end at once."""
LIMITS = ConnectionLimits(total=512)
"""Of the connections: the pages stream, so responses have no deadline."""


class DashboardError(FedplatError):
    """The dashboard cannot be served as requested; the message has the reason."""


class _Server(uvicorn.Server):
    """Leaves signals to its caller, and ends the streams when it stops: uvicorn would wait for them."""

    def __init__(self, config: uvicorn.Config, dashboard: Dashboard, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._dashboard, self._on_started = dashboard, on_started

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._dashboard.stop()
        await super().shutdown(sockets)


def split_address(text: str) -> tuple[str, int]:
    """Return the host and the port of `HOST:PORT`. Raises `DashboardError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise DashboardError(
            f"{text!r} is not an address to listen on; expected HOST:PORT, for instance 127.0.0.1:7480"
        )
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to a host."""
    if host in LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `DashboardError` if the address is taken or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError as exc:
        listening.close()
        raise DashboardError(
            f"the dashboard cannot listen on {host}:{port} ({exc.strerror}); choose another address with --listen"
        ) from exc
    return listening


def make_server(
    dashboard: Dashboard,
    tls: ssl.SSLContext | None,
    on_started: Callable[[], None] = lambda: None,
    limits: ConnectionLimits = LIMITS,
) -> uvicorn.Server:
    """Return the server of an app. Its `serve` needs the socket of `bind`."""
    config = uvicorn.Config(
        dashboard.app,
        lifespan="off",
        ws="none",
        http=http_connections.make_protocol(limits, tls),
        loop="asyncio",
        log_config=None,
        log_level="error",  # warnings are about requests, which anyone can send
        access_log=False,  # addresses may have filters that operators typed
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=STOP_S,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 * 1024,
    )
    return _Server(config, dashboard, on_started)
