"""The port of HTTP/1.1: its connections, TLS and start and stop, beside the ports of gRPC.

A request takes one connection, so their number is limited; beyond it, the oldest one of the greediest network is closed
that waits for its caller (see `fedplat.http_connections`). The size and the rate of what callers send is limited where
calls are admitted, as with gRPC.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import sslproto
from collections.abc import Callable

import uvicorn

from fedplat import http_connections
from fedplat.http_connections import BackgroundServer, ConnectionLimits
from fedplat_server import logs
from fedplat_server.auth import addresses, tls
from fedplat_server.config import ServerConfig
from fedplat_server.errors import ConfigError
from fedplat_server.rpc.http.app import MAX_HEADER_BYTES, Application

IDLE_S = 75
"""How long a connection may wait for its next request: longer than load balancers keep theirs."""
TLS_BUFFER_BYTES = 32 * 2**10
"""What asyncio allocates for each handshake of TLS; its default is eight times as much."""
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 2}
"""A caller that lost its network must not count as waiting; the same times as with gRPC."""


class CurrentContext:
    """Returns the context for the next handshake, with the certificates that the daemon has now."""

    def __init__(self, certificates: tls.Certificates) -> None:
        """Load the files. Raises `ConfigError`."""
        self._certificates = certificates
        self._loaded = certificates.loaded
        try:
            self._context = certificates.make_context()
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"the server's certificates cannot be used for --http-listen: {exc}") from exc

    def __call__(self) -> ssl.SSLContext:
        """Load certificates that have changed; keep the context if that fails, as while files are being replaced."""
        self._certificates.refresh()
        if self._certificates.loaded is not self._loaded:
            loaded = self._certificates.loaded
            try:
                self._context = self._certificates.make_context()
                self._loaded = loaded
            except (OSError, ssl.SSLError) as exc:
                logs.get().error("cannot load the changed certificates for HTTP; keeping the old ones", error=str(exc))
        return self._context


class HttpEndpoint:
    """The port. It is bound in the constructor, and accepts connections from `start` on."""

    def __init__(self, config: ServerConfig, certificates: tls.Certificates | None, application: Application) -> None:
        """Bind the port. Raises `ConfigError` if it is unavailable."""
        try:
            self._socket = http_connections.bind(config.http_listen, shared=config.share_port)
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on {config.http_listen}: {exc.strerror or exc}; choose another with "
                "--http-listen HOST:PORT"
            ) from exc
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self.port: int = self._socket.getsockname()[1]
        get_context: Callable[[], ssl.SSLContext] | None = None
        if certificates is not None:
            get_context = CurrentContext(certificates)
            _bound_tls_buffers()
        self._config = uvicorn.Config(
            application,  # type: ignore[arg-type]
            http=http_connections.make_protocol(_limits(config), get_context),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # warnings are about requests, which anyone can send
            access_log=False,
            server_header=False,
            proxy_headers=False,  # `auth/addresses.py` has the rule for them
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=IDLE_S,
            backlog=1024,
        )
        self._server: BackgroundServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections."""
        self._server = BackgroundServer(self._config)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="HTTP endpoint")

    async def stop(self, grace_s: float) -> None:
        """Accept no more; cut the connections of calls that are still open after `grace_s`."""
        server, task = self._server, self._task
        self._server = self._task = None
        if server is not None and task is not None:
            error = await server.finish(task, grace_s)
            if error is not None:
                logs.get().error("the HTTP endpoint has failed", error=str(error))
        self._socket.close()


def _limits(config: ServerConfig) -> ConnectionLimits:
    limits, proxies = config.limits, [addresses.parse_network(text) for text in config.trusted_proxies]
    return ConnectionLimits(
        limits.http_connections,
        limits.http_newcomers,
        limits.http_newcomers_per_network,
        limits.http_share_s,
        is_known=lambda address: addresses.is_within(address, proxies),
        body_s=None,
        response_s=None,
        stall_s=limits.idle_s,
    )


def _bound_tls_buffers() -> None:
    if hasattr(sslproto.SSLProtocol, "max_size"):  # an attribute without a promise
        sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
