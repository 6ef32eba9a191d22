"""mTLS: the client shows a short-lived certificate instead of signing each call, and gets the next one in good time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import grpc

from fedplat.wire.v1 import fleet_pb2
from fedplat_client import transport
from fedplat_client._auth.authenticator import CallCredentials, SignedAccess
from fedplat_client._auth.calls import Connection
from fedplat_client._state import keys
from fedplat_client._state.data_dir import DataDirectory, Identity
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import (
    CallError,
    CertificateExpiredError,
    DataDirectoryError,
    EnrollmentError,
    FencedError,
    IdentityError,
    UnknownClientError,
    UnreachableError,
)

RENEW_AFTER = 2 / 3
"""The part of its life after which a certificate is replaced."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    """A channel that shows a certificate; moments of the client's clock."""

    channel: grpc.Channel
    renew_at: float
    expires_at: float


class CertificateAccess:
    """Makes calls on the server's port for client certificates; a context manager that ends the connections.

    Certificates are asked for on the other port, by a signed call. They stay in memory: each start gets a new one.
    """

    def __init__(
        self,
        signed: SignedAccess,
        directory: DataDirectory,
        identity: Identity,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises `EnrollmentError` if the server has no TLS."""
        if not identity.tls:
            raise EnrollmentError(
                "this client was enrolled with a server without TLS, where certificates prove nothing; "
                "leave mtls out (or get a ticket of a server with TLS)"
            )
        self._signed = Connection(signed, timeout_s)
        self._directory = directory
        self._identity = identity
        self._clock = clock
        self._changing = threading.Lock()
        self._held: _Held | None = None
        self._retired: grpc.Channel | None = None

    def __enter__(self) -> CertificateAccess:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changing:
            self._retire()
            self._retire()

    def authenticate(self, method: str, request: bytes, signal: StopSignal) -> CallCredentials:
        """A pass for a call; gets a certificate if it is time to. Raises `CallError`, or `Cancelled`."""
        with self._changing:
            now = self._clock()
            if self._held is None or now >= self._held.renew_at:
                self._held = self._renew_if_due(now, signal)
            return CallCredentials(self._held.channel, ())

    def may_try_again(self, used: CallCredentials, exc: CallError) -> bool:
        """Whether a call that failed may be made again at once, with another certificate.

        Where nobody answers, the reason may be the certificate: TLS ends such connections without a word. Then the
        next call shows another one, too.
        """
        if isinstance(exc, CertificateExpiredError | FencedError | UnreachableError | UnknownClientError):
            with self._changing:
                if self._held is not None and self._held.channel is used.channel:
                    self._retire()
        # Fenced by a rival, or by the session that this very process has opened since: the signed call will tell.
        return isinstance(exc, CertificateExpiredError | FencedError)

    def _renew_if_due(self, now: float, signal: StopSignal) -> _Held:
        held = self._held
        try:
            fresh = self._request_certificate(now, signal)
        except IdentityError:
            raise
        except CallError as exc:
            if held is None or now >= held.expires_at:
                raise
            _logger.warning("The certificate cannot be renewed yet: %s", exc)
            return replace(held, renew_at=now + (held.expires_at - now) / 4)
        if held is not None:
            self._retire()
        _logger.info("The client has a new certificate.", extra={"valid_s": round(fresh.expires_at - now)})
        return fresh

    def _request_certificate(self, now: float, signal: StopSignal) -> _Held:
        key = self._directory.tls_key()
        try:
            request = fleet_pb2.RenewCertificateRequest(signing_request=keys.signing_request(key))
        except ValueError as exc:
            raise DataDirectoryError(
                f"{self._directory.path / 'tls.key'} is damaged ({exc}); delete it to get another one"
            ) from exc
        answer = self._signed.renew_certificate(request, signal)
        host = self._identity.server.rpartition(":")[0]
        shown = (key, answer.certificate.encode())
        channel = transport.connect(f"{host}:{answer.port}", tls=True, ca=self._identity.ca, shown=shown)
        return _Held(channel, now + RENEW_AFTER * answer.valid_s, now + answer.valid_s)

    def _retire(self) -> None:
        """Calls that are under way go on: the channel is closed when the next one is retired."""
        if self._retired is not None:
            self._retired.close()
        self._retired = self._held.channel if self._held is not None else None
        self._held = None
