"""The gRPC server: its services, its options, and the ports that it listens on."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable
from typing import Any, cast

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from fedplat import wire
from fedplat.wire.v1 import admin_pb2_grpc, fleet_pb2, fleet_pb2_grpc
from fedplat_server.auth.addresses import Origins
from fedplat_server.auth.certificates import CertificateIssuer, PeerCertificates
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.auth.tls import Certificates
from fedplat_server.config import ServerConfig, TlsFiles
from fedplat_server.errors import ConfigError
from fedplat_server.rpc import operator_access
from fedplat_server.rpc.admission import FLEET, Admission, OpenAdmission, Reads
from fedplat_server.rpc.clients import ClientsService
from fedplat_server.rpc.fleet import FleetService
from fedplat_server.rpc.handlers import Handler
from fedplat_server.rpc.health import Health
from fedplat_server.rpc.interceptor import ErrorInterceptor
from fedplat_server.rpc.jobs import JobsService
from fedplat_server.rpc.operator_access import OperatorAccess
from fedplat_server.rpc.operators import OperatorsService
from fedplat_server.rpc.privacy import PrivacyService
from fedplat_server.rpc.routing.router import Collector, LocalRoute, Router
from fedplat_server.rpc.routing.shared_port import PortReservation
from fedplat_server.rpc.services import Services
from fedplat_server.rpc.streams import UploadMessage

_SERVICES = (FLEET, *(service.full_name for service in operator_access.SERVICES))
MAX_STREAMS = 100
"""Calls that a connection may have open at a time; each may hold a window of `WINDOW_BYTES` before it is read."""
WINDOW_BYTES = 2**14
OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_REQUEST_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    # Clients keep long polls open through NATs, and may ping to do so.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client whose network is gone must not be taken for one that waits for work.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # gRPC's core cancels pending calls beyond 1,000 otherwise; waiting clients are bounded by our own limit.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # What a call may send before it is let in. A message that is asked for widens the window to its own size. With the
    # probe gRPC would widen each connection's window up to 8 MB by what the network seems to carry.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)


def route(services: Services, reads: Reads) -> LocalRoute:
    """Return the route of a daemon that leads: to its own services, for calls that are admitted."""
    collector = cast(Any, Collector())  # generated code takes it for a server
    fleet = FleetService(services)
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, collector)
    admin_pb2_grpc.add_JobsServicer_to_server(JobsService(services), collector)
    admin_pb2_grpc.add_ClientsServicer_to_server(ClientsService(services), collector)
    admin_pb2_grpc.add_OperatorsServicer_to_server(OperatorsService(services), collector)
    admin_pb2_grpc.add_PrivacyServicer_to_server(PrivacyService(services), collector)
    admission = Admission(OperatorAccess(services), fleet.read_claim, services.origins, reads, services.memory)
    return LocalRoute([_streams(fleet), *collector.handlers], admission.admit)


class _Open(grpc.GenericRpcHandler):
    """The services that are open to everybody, which every daemon has itself."""

    def __init__(self, collector: Collector, reads: Reads, origins: Origins) -> None:
        self._here = LocalRoute(collector.handlers, OpenAdmission(reads, origins).admit)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Who takes a call."""
        return self._here.handler(handler_call_details)


def _streams(fleet: FleetService) -> grpc.GenericRpcHandler:
    """The methods that move files, whose messages the generated code would copy several times."""
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


def _of_both(config: ServerConfig, folder: PkiFolder) -> grpc.ServerCredentials:
    """The server's own certificate, and only clients with one of the private authority. Raises `ConfigError`."""
    if config.tls is None:
        raise ConfigError("--mtls-listen needs TLS; leave --insecure out")
    try:
        folder.authority_in_use()
    except ConfigError as exc:
        raise ConfigError(
            f"--mtls-listen needs the private authority of {folder.folder}, which signs the clients' certificates "
            f"({exc}); fedplat-server init makes one"
        ) from exc
    files = TlsFiles(config.tls.certificate, config.tls.key, folder.ca)
    return Certificates(files).credentials(of_both=True)


def _ageing(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """Connections end after a while: gRPC spreads the moment by a tenth, and callers move to another one.

    No poll is cut by that. A longer transfer is, and goes on where it was.
    """
    grace_s = 2.0 * config.limits.max_wait_s
    return (
        ("grpc.max_connection_age_ms", int(1000 * config.connection_age_s)),
        ("grpc.max_connection_age_grace_ms", int(1000 * grace_s)),
    )


class Endpoint:
    """The ports of this daemon, from its start to its end; whoever leads, calls go where the switch lets them go.

    On the second one, `mtls_port` (0: none), everybody shows a certificate of a client: gRPC for Python cannot leave
    that open on one port. `peers` reads these certificates, `issuer` makes them.
    """

    def __init__(self, config: ServerConfig, utc_now: Callable[[], datetime.datetime]) -> None:
        """Takes the ports. Callers wait until `start`. Raises `ConfigError` if they cannot be had."""
        self.switch = Router(_SERVICES)
        self.reads = Reads(config.limits)
        self.certificates = Certificates(config.tls) if config.tls is not None else None
        # Without --share-port a second daemon on the port must fail, not share it.
        options = (*OPTIONS, *_ageing(config), ("grpc.so_reuseport", int(config.share_port)))
        self._server = aio.server(
            interceptors=(ErrorInterceptor(),), options=options, compression=grpc.Compression.NoCompression
        )
        self.health = Health(_SERVICES)
        origins = Origins(config.trusted_proxies, secrets.token_hex())  # no hop of a gateway ends here
        collector = cast(Any, Collector())
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, collector)
        if config.reflection:
            names = (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
            servicer = cast(Any, reflection).aio.ReflectionServicer(names)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, collector)
        self._server.add_generic_rpc_handlers((self.switch, _Open(collector, self.reads, origins)))
        self._join = lambda: None
        if config.share_port:
            self.port = self._share(config)
        else:
            self.port = self._bind(config.listen, "--listen", self._credentials())
        self.peers = PeerCertificates(utc_now)
        self.issuer = CertificateIssuer(None)
        self.mtls_port = 0
        if config.mtls_listen:
            folder = PkiFolder.of(config.data_dir)
            self.mtls_port = self._bind(config.mtls_listen, "--mtls-listen", _of_both(config, folder))
            self.issuer = CertificateIssuer(folder.authority_in_use, now=utc_now)

    def _bind(self, address: str, option: str, credentials: grpc.ServerCredentials | None) -> int:
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, credentials)
        except RuntimeError as exc:
            raise ConfigError(
                f"cannot listen on {address}: the port is taken or the address is not this machine's; "
                f"choose another with {option} HOST:PORT"
            ) from exc

    def _credentials(self) -> grpc.ServerCredentials | None:
        return self.certificates.credentials() if self.certificates is not None else None

    def _share(self, config: ServerConfig) -> int:
        """Takes this daemon's own port now, and the port that it shares when it begins to answer.

        Until then connections go to the others only: here they would wait for a database that may be away.
        """
        PortReservation(config.own_listen, "--advertise", shared=False).release()  # gRPC would share this one, too
        self._bind(config.own_listen, "--advertise", self._credentials())
        claim = PortReservation(config.listen, "--listen", shared=True)

        def join() -> None:
            self._bind(config.listen, "--listen", self._credentials())
            claim.release()

        self._join = join
        return int(config.listen.rpartition(":")[2])

    async def start(self) -> None:
        """Begins to answer."""
        self._join()
        await self.health.start()
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Ends; calls that take longer are cut."""
        await self._server.stop(grace_s)
