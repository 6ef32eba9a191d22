"""The HTTP port for Prometheus: `GET /metrics`, by uvicorn in the event loop of the daemon.

It has no login, so it is bounded: connections, the size and the time of a request, and the number of scrapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Callable, Generator, MutableMapping
from typing import Any, TypeAlias

import prometheus_client
import uvicorn
from prometheus_client import CollectorRegistry
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedplat_server import logs
from fedplat_server.auth.rate_limits import Bucket, take
from fedplat_server.errors import ConfigError

MAX_CONNECTIONS = 32
REQUEST_S = 10.0
"""The longest time from the first byte of a request to the end of its response."""
MAX_REQUEST_BYTES = 16 * 2**10
SCRAPES_PER_MINUTE = 120.0
"""At most so many scrapes in one burst, or evenly: a scrape runs in the event loop that also serves clients."""
STOP_S = 0.5
"""The time in which open responses can end when the daemon stops."""
_PAGE = b"fedplat-server: the metrics for Prometheus are at /metrics\n"

_Scope: TypeAlias = MutableMapping[str, Any]
_Application: TypeAlias = Callable[[Any, Any, Any], Any]


def make_application(registry: CollectorRegistry, clock: Callable[[], float]) -> _Application:
    """Return the ASGI application: `GET /metrics` and `GET /`. `clock` returns seconds."""
    prometheus_client.disable_created_metrics()  # a time series for each counter and histogram, of no use
    scrape = prometheus_client.make_asgi_app(registry)
    bucket = Bucket(SCRAPES_PER_MINUTE, clock())

    async def application(scope: _Scope, receive: Any, send: Any) -> None:
        nonlocal bucket
        if scope["path"] not in ("/", "/metrics"):
            await _answer(send, 404, b"not found; the metrics are at /metrics\n")
        elif scope["method"] != "GET":
            await _answer(send, 405, b"method not allowed; use GET\n", (b"allow", b"GET"))
        elif scope["path"] == "/":
            await _answer(send, 200, _PAGE)
        else:
            bucket, wait_s = take(bucket, clock(), SCRAPES_PER_MINUTE)
            if wait_s:
                text = f"too many scrapes: at most {SCRAPES_PER_MINUTE:g} a minute\n".encode()
                await _answer(send, 429, text, (b"retry-after", b"1"))
            else:
                await scrape(_keep_plain_headers(scope), _receive_no_body, send)

    return application


def _keep_plain_headers(scope: _Scope) -> _Scope:
    """Keep the headers that select the format, if they are ASCII: the library would fail for others."""
    kept = (b"accept", b"accept-encoding")
    return {**scope, "headers": [(name, value) for name, value in scope["headers"] if name in kept and value.isascii()]}


async def _receive_no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _answer(send: Any, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    plain = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [plain, *headers]})
    await send({"type": "http.response.body", "body": body})


class _BoundedProtocol(H11Protocol):
    """A connection that is closed if it is one too many, or if a request and its response take too long."""

    _deadline: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        self._set_deadline()

    @override
    def data_received(self, data: bytes) -> None:
        self._set_deadline()
        super().data_received(data)

    @override
    def on_response_complete(self) -> None:
        self._clear_deadline()
        super().on_response_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(REQUEST_S, self.transport.abort)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Server(uvicorn.Server):
    """A server without signal handlers, which would replace those of the daemon. It wakes up once a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Make the server end."""
        self.should_exit = True
        self._stopping.set()

    @override
    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # 0: update the header with the date
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    @contextlib.contextmanager
    @override
    def capture_signals(self) -> Generator[None]:
        yield


class MetricsEndpoint:
    """The port, which is bound in the constructor. Raises `ConfigError` if it is unavailable."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._socket = _bind(listen)
        self.port: int = self._socket.getsockname()[1]

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        """Serve within the block; on exit, end open responses within a second."""
        config = uvicorn.Config(
            make_application(self._registry, asyncio.get_running_loop().time),
            http=_BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # warnings are about requests, which anyone can send
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_REQUEST_BYTES,
            timeout_keep_alive=75,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[self._socket]), name="metrics endpoint")
        try:
            yield
        finally:
            server.stop()
            await asyncio.wait([task], timeout=STOP_S)
            server.force_exit = True
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            if error is not None:
                logs.get().error("the metrics endpoint has failed", error=str(error))


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = found[0]
        # Not `create_server`, whose sockets do not name their protocol: asyncio then delays small packets.
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(MAX_CONNECTIONS)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as exc:
        raise ConfigError(
            f"cannot serve metrics at {listen}: {exc.strerror or exc}; choose another address with --metrics HOST:PORT"
        ) from exc
