"""The metrics as a part of the daemon: what they show while it leads, and their port `GET /metrics`.

The port has no login, so it is bounded: connections, the size and the time of a request, and the number of scrapes. A
page of another site cannot read it in a browser by a name of its own that resolves to this address: the name of the
host is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import AsyncGenerator, Callable, Collection, MutableMapping
from typing import Any, TypeAlias

import prometheus_client
import uvicorn
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from fedplat import http_connections, rounds
from fedplat.http_connections import ConnectionLimits
from fedplat.rounds.states import ENDED_JOBS
from fedplat_server import errors, instruments, logs
from fedplat_server.auth import pki_folder, rate_limits, tls
from fedplat_server.config import ServerConfig
from fedplat_server.coordination.job_checks import Accountant
from fedplat_server.coordination.runner import Actor, Runner
from fedplat_server.database.store import Store
from fedplat_server.metrics.collector import DaemonCollector, LeaderState, PrivacyCosts
from fedplat_server.metrics.job_series import NUM_COMMITS, JobSeriesTable, ObservedActor
from fedplat_server.rpc.job_registry import JobRegistry

LAG_EVERY_S = 0.5


def _find_names(config: ServerConfig) -> list[str]:
    """Return the names by which others reach this daemon."""
    names = [config.advertise.rpartition(":")[0]] if config.advertise else []
    return names + (pki_folder.hosts_of(pki_folder.read(config.tls.certificate)[0]) if config.tls is not None else [])


class MetricsService:
    """The metrics of a daemon. Without `metrics_listen` it serves nothing and observes nothing.

    `count_dropped_lines` returns the number of dropped lines of the log.
    """

    def __init__(self, config: ServerConfig, count_dropped_lines: Callable[[], int]) -> None:
        self._config = config
        self._count_dropped_lines = count_dropped_lines
        self._collector: DaemonCollector | None = None
        self.instruments = instruments.Instruments()
        self.table = JobSeriesTable(self.instruments, config.job_metrics, time.time)
        self.port = 0

    @contextlib.asynccontextmanager
    async def serve(self, certificates: tls.Certificates | None) -> AsyncGenerator[None]:
        """Serve the metrics within the block. Raises `ConfigError` if the port is unavailable."""
        if not self._config.metrics_listen:
            yield
            return
        registry = CollectorRegistry()
        endpoint = MetricsEndpoint(self._config.metrics_listen, registry, _find_names(self._config))
        self.port = endpoint.port
        self._collector = DaemonCollector(self.instruments, self.table, certificates, self._count_dropped_lines)
        registry.register(self._collector)
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        lag = asyncio.create_task(self._measure_lag(), name="event loop lag")
        try:
            async with endpoint.serve():
                self._log_address()
                yield
        finally:
            lag.cancel()
            await asyncio.gather(lag, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def observe(
        self, actor: Actor, runner: Runner, jobs: JobRegistry, store: Store, accountant: Accountant
    ) -> AsyncGenerator[Actor]:
        """Yield the actor for the runner of the leader: `actor`, observed if metrics are served."""
        if self._collector is None:
            yield actor
            return
        for state in [record.state for record in jobs.all() if record.state.status not in ENDED_JOBS]:
            after = max(state.latest.version - NUM_COMMITS - 1, -1)
            self.table.restore(state, await store.jobs.list_versions(state.job_id, after=after))
        coordinator = runner.coordinator

        def now() -> float:
            return runner.now

        def list_jobs() -> list[rounds.JobState]:
            return [coordinator.jobs[each.job_id] for each in self.table.all() if each.job_id in coordinator.jobs]

        costs = PrivacyCosts(store.ledger, accountant, list_jobs)
        task = asyncio.create_task(costs.run(), name="privacy costs")
        self._collector.leader = LeaderState(coordinator, lambda: costs.losses)
        try:
            yield ObservedActor(actor, self.instruments, self.table, now, costs.refresh)
        finally:
            self._collector.leader = None
            self.table.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            self.instruments.event_loop_lag.observe(max(loop.time() - due, 0.0))

    def _log_address(self) -> None:
        host = self._config.metrics_listen.rpartition(":")[0].strip("[]")
        with contextlib.suppress(ValueError):  # a name
            address = ipaddress.ip_address(host)
            if address.is_unspecified or address.is_global:
                logs.get().warning(
                    "the metrics need no login: every host that reaches this address can read names and numbers of "
                    "jobs",
                    listen=self._config.metrics_listen,
                    mend="listen on loopback or a private network, or allow only Prometheus in the firewall",
                )
        logs.get().info("the metrics are served", port=self.port)


LIMITS = ConnectionLimits(total=32, body_s=10.0, response_s=10.0)
MAX_REQUEST_BYTES = 16 * 2**10
SCRAPES_PER_MINUTE = 120.0
"""At most so many scrapes in one burst, or evenly: a scrape runs in the event loop that also serves clients."""
_PRIVATE_DOMAINS = (".internal", ".local", ".localhost", ".svc")
"""Domains in which the owner of a public site cannot have a name."""
STOP_S = 0.5
"""The time in which open responses can end when the daemon stops."""
_PAGE = b"fedplat-server: the metrics for Prometheus are at /metrics\n"

_Scope: TypeAlias = MutableMapping[str, Any]
_Application: TypeAlias = Callable[[Any, Any, Any], Any]


def is_own_host(host: str, hosts: Collection[str]) -> bool:
    """Return whether the header `Host` has an address, one of `hosts`, or a name of a private network.

    >>> [is_own_host(host, {"fed.example.org"}) for host in ("10.0.0.7:9464", "server", "FED.example.org", "e.org")]
    [True, True, True, False]
    """
    name = http_connections.host_name(host).rstrip(".")
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return bool(name) and ("." not in name or name in hosts or name.endswith(_PRIVATE_DOMAINS))


def make_application(
    registry: CollectorRegistry, clock: Callable[[], float], hosts: Collection[str] = ()
) -> _Application:
    """Return the ASGI application: `GET /metrics` and `GET /`, for `hosts`. `clock` returns seconds."""
    prometheus_client.disable_created_metrics()  # a time series for each counter and histogram, of no use
    scrape = prometheus_client.make_asgi_app(registry)
    bucket = rate_limits.Bucket(SCRAPES_PER_MINUTE, clock())

    async def application(scope: _Scope, receive: Any, send: Any) -> None:
        nonlocal bucket
        named = [value for name, value in scope["headers"] if name == b"host"]
        if named and not all(is_own_host(value.decode("latin-1"), hosts) for value in named):
            text = (
                "the metrics are not known by that host name; use an address, or a name of the server's certificate\n"
            )
            await _answer(send, 421, text.encode())
        elif scope["path"] not in ("/", "/metrics"):
            await _answer(send, 404, b"not found; the metrics are at /metrics\n")
        elif scope["method"] != "GET":
            await _answer(send, 405, b"method not allowed; use GET\n", (b"allow", b"GET"))
        elif scope["path"] == "/":
            await _answer(send, 200, _PAGE)
        else:
            bucket, wait_s = rate_limits.take(bucket, clock(), SCRAPES_PER_MINUTE)
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


class MetricsEndpoint:
    """The port, which is bound in the constructor. Raises `ConfigError` if it is unavailable."""

    def __init__(self, listen: str, registry: CollectorRegistry, names: Collection[str] = ()) -> None:
        """Bind the port. `names` are further names of this daemon, besides that of `listen` and of this machine."""
        self._registry = registry
        own = (listen.rpartition(":")[0].strip("[]"), socket.gethostname())
        self._hosts = frozenset(name.lower() for name in (*own, *names))
        self._socket = _bind(listen)
        self.port: int = self._socket.getsockname()[1]

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        """Serve within the block; on exit, end open responses within a second."""
        config = uvicorn.Config(
            make_application(self._registry, asyncio.get_running_loop().time, self._hosts),
            http=http_connections.make_protocol(LIMITS),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # warnings are about requests, which anyone can send
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MAX_REQUEST_BYTES,
            timeout_keep_alive=5,
        )
        server = http_connections.BackgroundServer(config)
        task = asyncio.create_task(server.serve(sockets=[self._socket]), name="metrics endpoint")
        try:
            yield
        finally:
            error = await server.finish(task, STOP_S)
            if error is not None:
                logs.get().error("the metrics endpoint has failed", error=str(error))


def _bind(listen: str) -> socket.socket:
    try:
        bound = http_connections.bind(listen)
        try:
            bound.listen(LIMITS.total)
        except OSError:
            bound.close()
            raise
        return bound
    except OSError as exc:
        raise errors.ConfigError(
            f"cannot serve metrics at {listen}: {exc.strerror or exc}; choose another address with --metrics HOST:PORT"
        ) from exc
