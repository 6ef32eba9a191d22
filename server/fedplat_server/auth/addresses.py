"""Where a call comes from: its peer, or what a daemon or a trusted proxy in front of this one says of the caller.

A caller with IPv6 usually has a whole /64 to itself (RFC 6177), so what is counted is the network, not the address.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

from grpc import aio

from fedplat_server.auth import forwarding
from fedplat_server.errors import ConfigError

FORWARDED = "x-forwarded-for"
"""The metadata in which proxies name the caller, each adding the address that it was called from."""
MAX_PROXIES = 16
IPV6_PREFIX = 64
_CACHED = 4096
"""Peers and addresses whose parts are remembered: a flood of refused calls is to cost little."""

_Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_WITH_PORT = re.compile(r"\[(?P<six>[^\]]*)\](?::\d+)?|(?P<four>[0-9.]+):\d+")


class Origin(NamedTuple):
    """A caller's address, such as `ipv6:2001:db8::7`, and the network that it is counted in, `ipv6:2001:db8::/64`."""

    address: str
    network: str


class Origins:
    """Finds where calls come from. `trusted`: the networks of proxies; `secret`: that of the daemons' hops."""

    def __init__(self, trusted: Sequence[str], secret: str) -> None:
        self._trusted = [parse_network(text) for text in trusted]
        self._secret = secret

    def of(self, context: aio.ServicerContext[Any, Any]) -> Origin:
        """Return where a call comes from."""
        metadata = context.invocation_metadata() or ()
        forwarded = [part for key, value in metadata if key == FORWARDED for part in str(value).split(",")]
        return origin(forwarding.of(context, self._secret).peer, forwarded, self._trusted)

    def connection(self, context: aio.ServicerContext[Any, Any]) -> str:
        """Return the connection that a call comes by; empty behind a trusted proxy, whose connections many share."""
        peer = forwarding.of(context, self._secret).peer
        address = _of_peer(peer)
        is_shared = address is not None and any(address in network for network in self._trusted)
        return "" if is_shared else peer


def parse_network(text: str) -> _Network:
    """Return the network that a text such as `10.0.0.0/8` means. Raises `ConfigError`."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise ConfigError(f"trusted proxy {text!r}: expected an address or a network, such as 10.0.0.0/8") from exc


def origin(peer: str, forwarded: Sequence[str], trusted: Sequence[_Network]) -> Origin:
    """Return where a call comes from that `peer` (as gRPC has it) makes.

    `forwarded` is what proxies say, the nearest one last. Only what a trusted proxy adds is believed; what stands
    before it is the caller's own claim.

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
    for said in reversed(forwarded[-MAX_PROXIES:]):
        if not any(address in network for network in trusted):
            break
        before = _parse(said)
        if before is None:
            break
        address = before
    return address


@functools.lru_cache(_CACHED)
def _origin_of(address: _Address) -> Origin:
    if address.version == 4:
        return Origin(f"ipv4:{address}", f"ipv4:{address}")
    return Origin(f"ipv6:{address}", f"ipv6:{ipaddress.ip_network((address, IPV6_PREFIX), strict=False)}")


@functools.lru_cache(_CACHED)
def _of_peer(peer: str) -> _Address | None:
    """The address of a peer such as `ipv4:10.0.0.7:4242` or `ipv6:%5B::1%5D:4242`: ports change with connections."""
    kind, _, rest = peer.partition(":")
    return _parse(unquote(rest)) if kind in ("ipv4", "ipv6") else None


def _parse(text: str) -> _Address | None:
    text = text.strip()
    if found := _WITH_PORT.fullmatch(text):
        text = found["six"] or found["four"] or ""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])  # without the zone of a link-local one
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
