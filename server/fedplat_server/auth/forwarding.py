"""The metadata that a gateway adds to a call that it forwards to the leader.

The secret of the leader's term proves that a daemon of the same database sent the call: no other process has it.
A gateway removes these keys from a caller's metadata, and the leader ignores them without the secret.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from grpc import aio

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

_PREFIX = "fedplat-hop-"
_SECRET = f"{_PREFIX}secret"
_GATEWAY = f"{_PREFIX}gateway"
_CLIENT = f"{_PREFIX}client"
_PEER = f"{_PREFIX}peer"
# gRPC sets these for each HTTP/2 connection; it refuses or duplicates those that are forwarded.
_CONNECTION_HEADERS = ("user-agent", "content-type", "te", "grpc-", ":")


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardedCall:
    """The gateway that forwarded a call, and its report of the caller.

    `client`: the client of the certificate that the caller presented to the gateway (see `PeerCertificates.client_of`;
    "": no certificate). `peer`: the caller's address, as a peer string of gRPC.
    """

    gateway: str
    client: str = ""
    peer: str = ""


def is_marked(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether a call claims to be forwarded; it is then not forwarded a second time."""
    return any(key == _SECRET for key, _ in metadata)


def add_to_metadata(metadata: Iterable[tuple[str, str | bytes]], secret: str, call: ForwardedCall) -> Metadata:
    """Return the metadata with which a gateway forwards a call."""
    dropped = (_PREFIX, *_CONNECTION_HEADERS)
    kept = [(key, value) for key, value in metadata if not key.startswith(dropped)]
    return [*kept, (_SECRET, secret), (_GATEWAY, call.gateway), (_CLIENT, call.client), (_PEER, call.peer)]


def read(metadata: Iterable[tuple[str, str | bytes]], secret: str) -> ForwardedCall | None:
    """Return the gateway's report of a forwarded call; None if the call has no valid secret, so is not forwarded."""
    values = {key: value for key, value in metadata if key.startswith(_PREFIX)}
    claimed = values.get(_SECRET, "")
    claimed = claimed.encode() if isinstance(claimed, str) else claimed
    if not secrets.compare_digest(claimed, secret.encode()):
        return None
    return ForwardedCall(*(str(values.get(name, "")) for name in (_GATEWAY, _CLIENT, _PEER)))


def of(context: aio.ServicerContext[Any, Any], secret: str) -> ForwardedCall:
    """Return a call as its gateway reports it; for a direct call, one with its peer and no gateway."""
    return read(context.invocation_metadata() or (), secret) or ForwardedCall("", "", context.peer())
