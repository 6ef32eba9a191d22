"""The client's certificate towards other clients: at its own listener, and when it connects to those of peers.

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
from fedplat_client import transport
from fedplat_client._auth.authenticator import SignedAccess
from fedplat_client._auth.mtls import RENEW_AFTER, connect_signed, request_certificate
from fedplat_client._state.data_dir import DataDirectory, Identity
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import CallError, CallRefusedError, IdentityError

_logger = logging.getLogger(__name__)


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

    def renew(self, signal: StopSignal) -> PeerCredentials:
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
                except IdentityError:
                    raise
                except CallError as exc:
                    if issued is None or now >= issued.expires_at:
                        raise
                    _logger.warning("The certificate for peers cannot be renewed yet: %s", exc)
                    self._issued = replace(issued, renew_at=now + (issued.expires_at - now) / 4)
            return self.current

    def _request(self, now: float, signal: StopSignal) -> _Issued:
        key, answer = request_certificate(self._signed, self._directory, signal, listener=self._listens)
        if not answer.authorities:
            raise CallRefusedError(
                grpc.StatusCode.UNIMPLEMENTED.name,
                "the server does not issue certificates for connections between clients; update the server",
            )
        credentials = PeerCredentials(key, answer.certificate.encode(), answer.authorities.encode())
        renew_at, expires_at = now + RENEW_AFTER * answer.valid_s, now + answer.valid_s
        return _Issued(credentials, self._access.client_id, renew_at, expires_at)
