"""mTLS: the client's short-lived certificate towards the server, and towards other clients.

Both ends of such a connection present certificates of the server's authority. The one of a listener has the client's
DNS name (`fedplat.wire.auth.peer_host`), which the other end verifies. So a peer is who the authority says, whatever
address it was found at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import grpc

from fedplat.wire import auth
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import cancellation, errors, transport
from fedplat_client._auth.authenticator import CallCredentials, Connection, SignedAccess
from fedplat_client._state import data_dir
from fedplat_client._state.data_dir import DataDirectory, Identity

RENEW_AFTER = 2 / 3
"""The fraction of its lifetime after which a certificate is renewed."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _CertifiedChannel:
    """A channel with a client certificate; times of the client's clock."""

    channel: grpc.Channel
    renew_at: float
    expires_at: float


def connect_signed(signed: SignedAccess, identity: Identity, timeout_s: float, otherwise: str) -> Connection:
    """Return the connection on which certificates are requested. Raises `EnrollmentError` if the server has no TLS."""
    if not identity.tls:
        raise errors.EnrollmentError(
            "this client was enrolled with a server without TLS, where certificates prove nothing; "
            f"{otherwise} (or use a ticket of a server with TLS)"
        )
    return Connection(signed, timeout_s)


def request_certificate(
    signed: Connection, directory: DataDirectory, signal: cancellation.StopSignal, *, listener: bool = False
) -> tuple[bytes, fleet_pb2.RenewCertificateResponse]:
    """Request a certificate for the client's TLS key by a signed call; return the key (PEM) and the answer.

    `listener`: the certificate is also for the client's own listener. Raises `CallError`, `Cancelled` or
    `DataDirectoryError`.
    """
    key = directory.load_tls_key()
    try:
        signing_request = data_dir.make_signing_request(key)
    except ValueError as exc:
        raise errors.DataDirectoryError(
            f"{directory.path / 'tls.key'} is damaged ({exc}); delete it to get another one"
        ) from exc
    request = fleet_pb2.RenewCertificateRequest(signing_request=signing_request, listener=listener)
    return key, signed.renew_certificate(request, signal)


class CertificateAccess:
    """Makes calls on the server's port for client certificates; a context manager that closes the connections.

    Requests certificates on the other port, by a signed call. They stay in memory: each process start requests a new
    one.
    """

    def __init__(
        self,
        signed: SignedAccess,
        directory: DataDirectory,
        identity: Identity,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raise `EnrollmentError` if the server has no TLS."""
        self._signed = connect_signed(signed, identity, timeout_s, "disable mtls")
        self._directory = directory
        self._identity = identity
        self._clock = clock
        self._changing = threading.Lock()
        self._current: _CertifiedChannel | None = None
        self._retired: grpc.Channel | None = None

    def __enter__(self) -> CertificateAccess:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self._retire()
            self._retire()

    def authenticate(self, method: str, request: bytes, signal: cancellation.StopSignal) -> CallCredentials:
        """Return credentials for a call; renew the certificate if it is due. Raises `CallError` or `Cancelled`."""
        with self._changing:
            now = self._clock()
            if self._current is None or now >= self._current.renew_at:
                self._current = self._renew(now, signal)
            return CallCredentials(self._current.channel, (), began_at=now)

    def may_try_again(self, used: CallCredentials, exc: errors.CallError) -> bool:
        """Return whether a failed call may be repeated at once, with another certificate.

        An unreachable server may be due to the certificate, since TLS then closes the connection without an error. So
        the next call presents another certificate in this case too, unless the call had waited at the server.
        """
        if isinstance(exc, errors.UnreachableError) and exc.was_cut(self._clock() - used.began_at):
            return False
        if isinstance(
            exc,
            errors.CertificateExpiredError | errors.FencedError | errors.UnreachableError | errors.UnknownClientError,
        ):
            with self._changing:
                if self._current is not None and self._current.channel is used.channel:
                    self._retire()
        # The client is fenced by a rival, or by a newer session of this process: the signed call tells them apart.
        return isinstance(exc, errors.CertificateExpiredError | errors.FencedError)

    def _renew(self, now: float, signal: cancellation.StopSignal) -> _CertifiedChannel:
        current = self._current
        try:
            fresh = self._request_certificate(now, signal)
        except errors.IdentityError:
            raise
        except errors.CallError as exc:
            if current is None or now >= current.expires_at:
                raise
            _logger.warning("The certificate cannot be renewed yet: %s", exc)
            return replace(current, renew_at=now + (current.expires_at - now) / 4)
        if current is not None:
            self._retire()
        _logger.info("The client has a new certificate.", extra={"valid_s": round(fresh.expires_at - now)})
        return fresh

    def _request_certificate(self, now: float, signal: cancellation.StopSignal) -> _CertifiedChannel:
        key, answer = request_certificate(self._signed, self._directory, signal)
        host = self._identity.server.rpartition(":")[0]
        certificate = (key, answer.certificate.encode())
        channel = transport.connect(
            f"{host}:{answer.port}", tls=True, ca=self._identity.ca, client_certificate=certificate
        )
        return _CertifiedChannel(channel, now + RENEW_AFTER * answer.valid_s, now + answer.valid_s)

    def _retire(self) -> None:
        """Retire the current channel; close the one retired before. Calls in flight on the former can still finish."""
        if self._retired is not None:
            self._retired.close()
        self._retired = self._current.channel if self._current is not None else None
        self._current = None


@dataclass(frozen=True)
class PeerCredentials:
    """A client's private key and certificate, and the authorities that its peers' certificates must be of; all PEM."""

    key: bytes = field(repr=False)
    certificate: bytes
    authorities: bytes

    def connect(self, address: str, client_id: str) -> grpc.Channel:
        """Open a channel to a peer's listener; its certificate must have the name of this client."""
        return transport.connect(
            f"dns:///{address}",  # the peer chose it: gRPC would take a host `xds` for another kind of target
            tls=True,
            ca=self.authorities.decode(),
            client_certificate=(self.key, self.certificate),
            expected_host=auth.peer_host(client_id),
        )


@dataclass(frozen=True)
class _Issued:
    """Credentials of a client; times of the client's clock."""

    credentials: PeerCredentials
    client_id: str
    renew_at: float
    expires_at: float


class PeerAccess:
    """Requests the client's certificate towards peers, and renews it; thread-safe.

    `listens`: the certificate is also for the client's own listener.
    """

    def __init__(
        self,
        signed: SignedAccess,
        directory: DataDirectory,
        identity: Identity,
        timeout_s: float,
        *,
        listens: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raise `EnrollmentError` if the server has no TLS."""
        self._signed = connect_signed(signed, identity, timeout_s, "remove peer_listen")
        self._access = signed
        self._directory = directory
        self._listens = listens
        self._clock = clock
        self._changing = threading.Lock()
        self._issued: _Issued | None = None

    @property
    def current(self) -> PeerCredentials:
        """The credentials that `renew` returned last."""
        assert self._issued is not None, "renew was not called"
        return self._issued.credentials

    def renew(self, signal: cancellation.StopSignal) -> PeerCredentials:
        """Return the credentials; request a certificate if it is due. Raises `CallError` or `Cancelled`.

        If that fails, a certificate that is still valid is kept, and the next request is made after a quarter of the
        time for which it is.
        """
        with self._changing:
            now = self._clock()
            issued = self._issued
            if issued is not None and issued.client_id != self._access.client_id:
                issued = None  # the client has enrolled again
            if issued is None or now >= issued.renew_at:
                try:
                    self._issued = self._request(now, signal)
                except errors.IdentityError:
                    raise
                except errors.CallError as exc:
                    if issued is None or now >= issued.expires_at:
                        raise
                    _logger.warning("The certificate for peers cannot be renewed yet: %s", exc)
                    self._issued = replace(issued, renew_at=now + (issued.expires_at - now) / 4)
            return self.current

    def _request(self, now: float, signal: cancellation.StopSignal) -> _Issued:
        key, answer = request_certificate(self._signed, self._directory, signal, listener=self._listens)
        if not answer.authorities:
            raise errors.CallRefusedError(
                grpc.StatusCode.UNIMPLEMENTED.name,
                "the server does not issue certificates for connections between clients; update the server",
            )
        credentials = PeerCredentials(key, answer.certificate.encode(), answer.authorities.encode())
        renew_at, expires_at = now + RENEW_AFTER * answer.valid_s, now + answer.valid_s
        return _Issued(credentials, self._access.client_id, renew_at, expires_at)
