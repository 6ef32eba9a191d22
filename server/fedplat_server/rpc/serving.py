"""The gRPC server: its services, options and ports, and its health.

Ready means that the database answers or, at a gateway, that the leader is reachable: load balancers send no calls to a
daemon that is not ready. Alive means that the process serves its port. Restart policies must use liveness: a restart
does not bring back a database.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from typing_extensions import override

from fedplat import wire
from fedplat.wire.v1 import fleet_pb2, fleet_pb2_grpc
from fedplat_server import errors, logs
from fedplat_server.auth import pki_folder, tls
from fedplat_server.auth.addresses import Origins
from fedplat_server.config import ServerConfig
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.store import Store
from fedplat_server.instruments import Instruments
from fedplat_server.messages.streams import UploadMessage
from fedplat_server.rpc import interceptor, operator_access
from fedplat_server.rpc.admission import FLEET, Admission, OpenAdmission, Reads, is_public
from fedplat_server.rpc.http import forms
from fedplat_server.rpc.http.app import Application
from fedplat_server.rpc.http.endpoint import HttpEndpoint
from fedplat_server.rpc.interceptor import Handler
from fedplat_server.rpc.router import Collector, LocalRoute, PortReservation, Router

if TYPE_CHECKING:
    from fedplat_server.tracing.provider import Tracing


_Servicer = TypeVar("_Servicer")
_SERVICES = (FLEET, *(service.full_name for service in operator_access.SERVICES))
_HTTP_METHODS: tuple[Any, ...] = (
    *fleet_pb2.DESCRIPTOR.services_by_name["Fleet"].methods,
    health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name["Check"],
)
_OPERATORS_METHODS: tuple[Any, ...] = tuple(
    method for service in operator_access.SERVICES for method in service.methods
)
MAX_STREAMS = 100
"""Maximum open calls of a connection; each may hold a window of `WINDOW_BYTES` before it is read."""
WINDOW_BYTES = 2**14
OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    # Clients may ping, to keep long polls open through NATs.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Detect clients that lost their network: they must not count as waiting.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # By default gRPC's core cancels pending calls beyond 1,000; the server's own limit applies to waiting clients.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # The bytes that a call may send before it is admitted; reading a message extends the window to the message's size.
    # With the BDP probe, gRPC would extend each connection's window up to 8 MB by its estimate of the bandwidth.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)


def combine(service: type[_Servicer], *makers: Callable[[], _Servicer]) -> _Servicer:
    """Return one object for a service whose methods several handlers share. Each overrides those that it handles."""
    combined, handlers = service(), [make() for make in makers]
    for name in (name for name in vars(service) if not name.startswith("_")):
        (method,) = [getattr(each, name) for each in handlers if name in vars(type(each))]
        setattr(combined, name, method)
    return combined


def route(
    fleet: fleet_pb2_grpc.FleetServicer, add_others: Sequence[Callable[[Any], None]], admission: Admission
) -> LocalRoute:
    """Return the route of the leader, to its own services, for admitted calls; each of `add_others` adds one more."""
    collector = Collector()
    for add in (functools.partial(fleet_pb2_grpc.add_FleetServicer_to_server, fleet), *add_others):
        add(cast(Any, collector))  # generated code expects a server
    return LocalRoute([_file_methods(fleet), *collector.handlers], admission.admit)


class _PublicServices(grpc.GenericRpcHandler):
    """The services without authentication, which every daemon serves itself."""

    def __init__(self, collector: Collector, reads: Reads, origins: Origins) -> None:
        self._route = LocalRoute(collector.handlers, OpenAdmission(reads, origins).admit)

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        return self._route.handler(handler_call_details)


def _file_methods(fleet: fleet_pb2_grpc.FleetServicer) -> grpc.GenericRpcHandler:
    """Return handlers for the methods that move files: generated code would copy their messages several times."""
    methods = {
        "Download": grpc.unary_stream_rpc_method_handler(
            cast(Any, fleet.Download), request_deserializer=fleet_pb2.DownloadRequest.FromString
        ),
        "Upload": grpc.stream_unary_rpc_method_handler(
            cast(Any, fleet.Upload),
            request_deserializer=UploadMessage.of,
            response_serializer=fleet_pb2.UploadResponse.SerializeToString,
        ),
    }
    return grpc.method_handlers_generic_handler(FLEET, methods)


def _mtls_credentials(config: ServerConfig, folder: pki_folder.PkiFolder) -> grpc.ServerCredentials:
    """Return credentials that require a client certificate of the private authority. Raises `ConfigError`."""
    if config.tls is None:
        raise errors.ConfigError("--mtls-listen needs TLS; leave --insecure out")
    try:
        folder.authority_in_use()
    except errors.ConfigError as exc:
        raise errors.ConfigError(
            f"--mtls-listen needs the private authority of {folder.folder}, which signs the clients' certificates "
            f"({exc}); fedplat-server init creates one"
        ) from exc
    files = dataclasses.replace(config.tls, ca=folder.ca)
    return tls.Certificates(files).credentials(mutual=True)


def _connection_age_options(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """Return the options that close a connection after some time (randomized by 10 %), so that callers reconnect.

    The grace period is long enough for every poll. A longer transfer is interrupted, and resumes at its offset.
    """
    grace_s = 2.0 * config.limits.max_wait_s
    return (
        ("grpc.max_connection_age_ms", int(1000 * config.connection_age_s)),
        ("grpc.max_connection_age_grace_ms", int(1000 * grace_s)),
    )


class Endpoint:
    """The ports of this daemon, for its whole lifetime; `router` routes their calls to the current leader.

    The second port, `mtls_port` (0: none), requires client certificates: gRPC for Python cannot make them optional on
    one port. `peers` reads these certificates, `issuer` signs them. `health_port` (0: none) serves probes without TLS.
    """

    def __init__(
        self,
        config: ServerConfig,
        utc_now: Callable[[], datetime.datetime],
        instruments: Instruments,
        tracing: Tracing | None = None,
    ) -> None:
        """Bind the ports. Callers wait until `start`. Raises `ConfigError` if a port is unavailable."""
        self.tracing = tracing
        self._instruments = instruments
        self.health_port = 0
        self.router = Router(_SERVICES)
        self.reads = Reads(config.limits)
        self.certificates = tls.Certificates(config.tls) if config.tls is not None else None
        # Without --share-port, a second daemon on the port must fail, not share it.
        options = (*OPTIONS, *_connection_age_options(config), ("grpc.so_reuseport", int(config.share_port)))
        errors_of_calls = interceptor.ErrorInterceptor(instruments, tracing)
        self._server = aio.server(
            interceptors=(errors_of_calls,),
            options=options,
            compression=grpc.Compression.NoCompression,
        )
        self.health = Health(_SERVICES)
        origins = Origins(config.trusted_proxies, secrets.token_hex())  # gateways do not forward to public services
        collector = cast(Any, Collector())
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, collector)
        if config.reflection:
            names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            servicer = cast(Any, reflection).aio.ReflectionServicer(names)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, collector)
        public = _PublicServices(collector, self.reads, origins)
        self._server.add_generic_rpc_handlers((self.router, public))
        self._probes = self._probe_server(config, origins)
        self._join = lambda: None
        if config.share_port:
            self.port = self._share(config)
        else:
            self.port = self._bind(config.listen, "--listen", self._credentials())
        self.peers = tls.PeerCertificates(utc_now, required=bool(config.mtls_listen))
        self.issuer = tls.CertificateIssuer(None)
        self.mtls_port = 0
        if config.mtls_listen:
            folder = pki_folder.PkiFolder.of(config.data_dir)
            self.mtls_port = self._bind(config.mtls_listen, "--mtls-listen", _mtls_credentials(config, folder))
            self.issuer = tls.CertificateIssuer(folder, now=utc_now)
        self.http_port = 0
        self._http: HttpEndpoint | None = None
        if config.http_listen:
            application = Application(
                forms.list_forms((*_HTTP_METHODS, *(_OPERATORS_METHODS if config.http_operators else ()))),
                lambda details: self.router.service(details) or public.service(details),
                errors_of_calls.wrap,
                is_public,
                config.http_origins,
            )
            self._http = HttpEndpoint(config, self.certificates, application)
            self.http_port = self._http.port

    def _bind(self, address: str, option: str, credentials: grpc.ServerCredentials | None) -> int:
        return _bind(self._server, address, option, credentials)

    def _probe_server(self, config: ServerConfig, origins: Origins) -> aio.Server | None:
        """Return a server for the health service alone, without TLS, which probes of Kubernetes cannot use.

        None without an address. It has its own limits: callers of the other ports cannot keep probes out.
        """
        if not config.health_listen:
            return None
        collector = cast(Any, Collector())
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, collector)
        server = aio.server(
            handlers=[_PublicServices(collector, Reads(config.limits), origins)],
            interceptors=(interceptor.ErrorInterceptor(self._instruments, None),),
            options=(*OPTIONS, ("grpc.so_reuseport", 0)),
        )
        self.health_port = _bind(server, config.health_listen, "--health", None)
        return server

    def _credentials(self) -> grpc.ServerCredentials | None:
        return self.certificates.credentials() if self.certificates is not None else None

    def _share(self, config: ServerConfig) -> int:
        """Bind this daemon's own port now, and listen on the shared port in `start`.

        Until then the other daemons get all connections: here they would wait for a database that may be unavailable.
        """
        PortReservation(config.own_listen, "--advertise", shared=False).release()  # fails where gRPC would share
        self._bind(config.own_listen, "--advertise", self._credentials())
        reservation = PortReservation(config.listen, "--listen", shared=True)

        def join() -> None:
            self._bind(config.listen, "--listen", self._credentials())
            reservation.release()

        self._join = join
        return int(config.listen.rpartition(":")[2])

    async def start_probes(self) -> None:
        """Report on the port for probes that this daemon is alive, and not ready yet."""
        if self._probes is not None:
            await self.health.start()
            await self._probes.start()

    async def start(self) -> None:
        """Start serving calls."""
        self._join()
        await self.health.start()
        await self._server.start()
        if self._http is not None:
            await self._http.start()

    async def stop(self, grace_s: float) -> None:
        """Stop serving; cancel calls that are still open after `grace_s`."""
        stops = [self._server.stop(grace_s)]
        if self._http is not None:
            stops.append(self._http.stop(grace_s))
        await asyncio.gather(*stops)
        if self._probes is not None:
            await self._probes.stop(0)


def _bind(server: aio.Server, address: str, option: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as exc:
        raise errors.ConfigError(
            f"cannot listen on {address}: the port is taken or the address is not this machine's; "
            f"choose another with {option} HOST:PORT"
        ) from exc


LIVENESS = "liveness"
CHECK_S = 1.0
"""How often the database is pinged."""
PING_TIMEOUT_S = 5.0
"""A database counts as unavailable when a ping has had no answer for this long."""

_Status = health_pb2.HealthCheckResponse


class Health:
    """The state that the health service reports; `watch` updates it."""

    def __init__(self, services: Iterable[str]) -> None:
        self.servicer: Any = cast(Any, health).aio.HealthServicer()
        self._names = ("", *services)
        self._ready: bool | None = None
        self._stopped = False

    async def start(self) -> None:
        """Report alive, and ready if `set_ready(True)` was called before."""
        await self.servicer.set(LIVENESS, _Status.SERVING)
        await self.set_ready(self._ready or False)

    async def stop(self) -> None:
        """Report not ready from now on; stay alive."""
        await self.set_ready(False)
        self._stopped = True

    async def watch(self, store: Store, runner: Runner) -> None:
        """Ping the database and report readiness, until cancelled."""
        ping: asyncio.Task[None] | None = None
        try:
            while True:
                ping = ping or asyncio.create_task(store.ping(), name="ping")
                # A slow ping is not cancelled, which would cost a connection: the next iteration waits for it again.
                await asyncio.wait([ping], timeout=PING_TIMEOUT_S)
                is_available = False
                if ping.done():
                    is_available, ping = _check_ping(ping), None
                before = self._ready
                await self.set_ready(is_available and not runner.in_doubt)
                if self._ready != before:
                    logs.get().info("the server is ready again" if self._ready else "the server is not ready")
                await asyncio.sleep(CHECK_S)
        finally:
            if ping is not None:
                ping.cancel()

    async def set_ready(self, ready: bool) -> None:
        """Report ready or not ready from now on."""
        if self._stopped or ready == self._ready:
            return
        self._ready = ready
        for name in self._names:
            await self.servicer.set(name, _Status.SERVING if ready else _Status.NOT_SERVING)


def _check_ping(ping: asyncio.Task[None]) -> bool:
    error = ping.exception()
    if error is not None and not isinstance(error, errors.StoreError):
        logs.get().error("pinging the database failed", exc_info=error)
    return error is None
