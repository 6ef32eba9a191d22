"""The origin of a call: its peer, or the address that a gateway daemon or a trusted proxy reports.

A caller with IPv6 usually has a whole /64 (RFC 6177), so rate limits count networks, not addresses.

The secret of the leader's term proves that a daemon of the same database sent the call: no other process has it.
A gateway removes these keys from a caller's metadata, and the leader ignores them without the secret.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote

from fedplat import fair_places
from fedplat_server.errors import ConfigError

FORWARDED = "x-forwarded-for"
"""The metadata key in which proxies report the caller: each appends the address that called it."""
MAX_PROXIES = 16
_CACHED = 4096
"""Size of the caches of parsed peers and addresses, which make refusing a flood of calls cheap."""

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_WITH_PORT = re.compile(r"\[(?P<six>[^\]]*)\](?::\d+)?|(?P<four>[0-9.]+):\d+")


class Origin(NamedTuple):
    """A caller's address, such as `ipv6:2001:db8::7`, and the network that it is counted in, `ipv6:2001:db8::/64`."""

    address: str
    network: str

    @property
    def groups(self) -> fair_places.Groups:
        """The networks that it may own, the widest first."""
        return fair_places.groups_of(self.address.partition(":")[2] or self.address)


class Addressed(Protocol):
    """What shows where a call comes from."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the metadata of the caller."""
        ...

    def peer(self) -> str:
        """Return the caller's address in the form of gRPC."""
        ...


class Origins:
    """Finds the origins of calls. `trusted`: the networks of proxies; `secret`: that of forwarded calls."""

    def __init__(self, trusted: Sequence[str], secret: str) -> None:
        self._trusted = [parse_network(text) for text in trusted]
        self._secret = secret

    def of(self, context: Addressed) -> Origin:
        """Return the origin of a call."""
        metadata = context.invocation_metadata() or ()
        forwarded = [part for key, value in metadata if key == FORWARDED for part in str(value).split(",")]
        return origin(forwarded_for(context, self._secret).peer, forwarded, self._trusted)

    def connection(self, context: Addressed) -> str:
        """Return the connection of a call; empty behind a trusted proxy, where callers share connections."""
        peer = forwarded_for(context, self._secret).peer
        address = _of_peer(peer)
        is_shared = address is not None and any(address in network for network in self._trusted)
        return "" if is_shared else peer


def parse_network(text: str) -> _Network:
    """Parse a network such as `10.0.0.0/8`. Raises `ConfigError` if it is invalid."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise ConfigError(f"trusted proxy {text!r}: expected an address or a network, such as 10.0.0.0/8") from exc


def is_within(text: str, networks: Sequence[_Network]) -> bool:
    """Return whether an address is in one of the networks.

    >>> is_within("10.0.0.7", [parse_network("10.0.0.0/8")]), is_within("::1", [parse_network("10.0.0.0/8")])
    (True, False)
    """
    address = _parse(text)
    return address is not None and any(address in network for network in networks)


def origin(peer: str, forwarded: Sequence[str], trusted: Sequence[_Network]) -> Origin:
    """Return the origin of a call from `peer`, a peer string of gRPC.

    `forwarded` has the addresses that proxies reported, the nearest proxy last. Only addresses that a trusted proxy
    appended count; those before them are the caller's own claim.

    >>> origin("ipv4:10.0.0.1:443", ["1.1.1.1", "192.0.2.7"], [ipaddress.ip_network("10.0.0.0/8")]).address
    'ipv4:192.0.2.7'
    >>> origin("ipv6:%5B2001:db8::7%5D:443", ["1.1.1.1"], [])
    Origin(address='ipv6:2001:db8::7', network='ipv6:2001:db8::/64')
    """
    address = _of_peer(peer)
    if address is None:
        return Origin(peer[:100], peer[:100])
    return _origin_of(_first_untrusted(address, forwarded, trusted))


def _first_untrusted(address: _Address, forwarded: Sequence[str], trusted: Sequence[_Network]) -> _Address:
    for text in reversed(forwarded[-MAX_PROXIES:]):
        if not any(address in network for network in trusted):
            break
        previous = _parse(text)
        if previous is None:
            break
        address = previous
    return address


@functools.lru_cache(_CACHED)
def _origin_of(address: _Address) -> Origin:
    if address.version == 4:
        return Origin(f"ipv4:{address}", f"ipv4:{address}")
    return Origin(f"ipv6:{address}", f"ipv6:{ipaddress.ip_network((address, fair_places.IPV6_PREFIX), strict=False)}")


@functools.lru_cache(_CACHED)
def _of_peer(peer: str) -> _Address | None:
    """Return the address, without port, of a peer such as `ipv4:10.0.0.7:4242` or `ipv6:%5B::1%5D:4242`."""
    kind, _, rest = peer.partition(":")
    return _parse(unquote(rest)) if kind in ("ipv4", "ipv6") else None


def _parse(text: str) -> _Address | None:
    text = text.strip()
    if match := _WITH_PORT.fullmatch(text):
        text = match["six"] or match["four"] or ""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])  # without the zone of a link-local address
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]

PREFIX = "fedplat-hop-"
"""The beginning of the metadata with which gateways forward calls."""
_SECRET = f"{PREFIX}secret"
_GATEWAY = f"{PREFIX}gateway"
_CLIENT = f"{PREFIX}client"
_PEER = f"{PREFIX}peer"
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


def is_forwarded(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether a call claims to be forwarded; it is then not forwarded a second time."""
    return any(key == _SECRET for key, _ in metadata)


def add_forwarding(metadata: Iterable[tuple[str, str | bytes]], secret: str, call: ForwardedCall) -> Metadata:
    """Return the metadata with which a gateway forwards a call."""
    dropped = (PREFIX, *_CONNECTION_HEADERS)
    kept = [(key, value) for key, value in metadata if not key.startswith(dropped)]
    return [*kept, (_SECRET, secret), (_GATEWAY, call.gateway), (_CLIENT, call.client), (_PEER, call.peer)]


def read_forwarding(metadata: Iterable[tuple[str, str | bytes]], secret: str) -> ForwardedCall | None:
    """Return the gateway's report of a forwarded call; None if the call has no valid secret, so is not forwarded."""
    values = {key: value for key, value in metadata if key.startswith(PREFIX)}
    claimed = values.get(_SECRET, "")
    claimed = claimed.encode() if isinstance(claimed, str) else claimed
    if not secrets.compare_digest(claimed, secret.encode()):
        return None
    return ForwardedCall(*(str(values.get(name, "")) for name in (_GATEWAY, _CLIENT, _PEER)))


def forwarded_for(context: Addressed, secret: str) -> ForwardedCall:
    """Return a call as its gateway reports it; for a direct call, one with its peer and no gateway."""
    return read_forwarding(context.invocation_metadata() or (), secret) or ForwardedCall("", "", context.peer())
