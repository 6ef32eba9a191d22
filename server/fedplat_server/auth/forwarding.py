"""What a gateway adds to the metadata of a call that it passes on, and what the leader believes of it.

The secret of the leader's term says that a daemon of the same database speaks. Nobody else knows it, so that what a
caller from outside puts under these names is worth nothing: a gateway takes it away, a leader ignores it.
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
# Every HTTP/2 connection has its own; gRPC refuses or doubles them.
_OWN_TO_A_CONNECTION = ("user-agent", "content-type", "te", "grpc-", ":")


@dataclasses.dataclass(frozen=True, slots=True)
class ForwardedCall:
    """A call that came by a gateway: which one, and what it knows of the caller.

    `client`: the client that the caller proved to be to the gateway by its certificate (see `Peers.client_of`; "":
    none). `peer`: its address, as gRPC has it.
    """

    gateway: str
    client: str = ""
    peer: str = ""


def is_marked(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Whether a call says that it came by a gateway; it is not passed on a second time."""
    return any(key == _SECRET for key, _ in metadata)


def add_to_metadata(metadata: Iterable[tuple[str, str | bytes]], secret: str, call: ForwardedCall) -> Metadata:
    """The metadata of a call as it is passed on."""
    dropped = (_PREFIX, *_OWN_TO_A_CONNECTION)
    kept = [(key, value) for key, value in metadata if not key.startswith(dropped)]
    return [*kept, (_SECRET, secret), (_GATEWAY, call.gateway), (_CLIENT, call.client), (_PEER, call.peer)]


def read(metadata: Iterable[tuple[str, str | bytes]], secret: str) -> ForwardedCall | None:
    """How a call came here, if it proves that by the secret; None for one that came directly."""
    found = {key: value for key, value in metadata if key.startswith(_PREFIX)}
    given = found.get(_SECRET, "")
    given = given.encode() if isinstance(given, str) else given
    if not secrets.compare_digest(given, secret.encode()):
        return None
    return ForwardedCall(*(str(found.get(name, "")) for name in (_GATEWAY, _CLIENT, _PEER)))


def of(context: aio.ServicerContext[Any, Any], secret: str) -> ForwardedCall:
    """Where a call comes from: by a gateway, or straight from its peer."""
    return read(context.invocation_metadata() or (), secret) or ForwardedCall("", "", context.peer())
