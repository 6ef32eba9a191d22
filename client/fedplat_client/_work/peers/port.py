"""The client's ways to other clients: its certificate towards them, and its own port if its operator opened one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedplat_client import cancellation, errors

if TYPE_CHECKING:  # most clients have neither
    from fedplat_client._auth.mtls import PeerAccess, PeerCredentials
    from fedplat_client._work.peers.listener import PeerListener


@dataclass(frozen=True)
class PeerPort:
    """`access` is None if the server has no TLS, `listener` if the client has no port, at `address` for others."""

    access: PeerAccess | None = None
    listener: PeerListener | None = None
    address: str = ""

    def keep_open(self, signal: cancellation.StopSignal) -> None:
        """Open the port if the client has one, and renew its certificate. Raises `ListenerError` or `CallError`."""
        if self.listener is not None:
            assert self.access is not None
            self.access.renew(signal)
            self.listener.open()

    def keep_certificate(self, signal: cancellation.StopSignal) -> None:
        """Renew the certificate of the port if it is due. Raises `PeerError` or `Cancelled`."""
        if self.listener is not None:
            self.renew(signal)

    def renew(self, signal: cancellation.StopSignal) -> PeerCredentials:
        """Return the client's credentials towards peers. Raises `PeerError` if it gets none, or `Cancelled`."""
        if self.access is None:
            raise errors.PeerError("REFUSED", "this client has no certificate for peers, because its server has no TLS")
        try:
            return self.access.renew(signal)
        except errors.CallError as exc:
            raise errors.PeerError("REFUSED", f"this client gets no certificate for peers: {exc}") from exc
