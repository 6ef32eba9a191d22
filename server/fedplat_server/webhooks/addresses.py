"""The addresses that webhooks may reach: public ones, and those in networks that the server's owner allows.

An operator chooses the URL, so without this check the server would make requests in its own network for that operator.
The check applies to the address that is connected to, after name resolution: a name that resolves to another address
at each query gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from fedplat_server.errors import ConfigError
from fedplat_server.records.events import MAX_WEBHOOKS

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""A function that returns the addresses of a host name. Raises `socket.gaierror`."""

MAX_ADDRESSES = 8
"""Maximum number of addresses of a host that are considered."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL = tuple(
    map(ipaddress.ip_network, ("192.88.99.0/24", "192.31.196.0/24", "192.175.48.0/24", "3fff::/20", "5f00::/16"))
)
"""Relays, sinks, examples and segment routing (IANA's registries of special addresses): newer than Python's tables."""
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")


def parse_network(text: str) -> Network:
    """Parse a network such as `10.0.0.0/8`. Raises `ConfigError` if it is invalid."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as exc:
        raise ConfigError(f"webhook network {text!r}: expected an address or a network, such as 10.0.0.0/8") from exc


class Resolver:
    """Resolves names in threads of its own: a slow name server delays only the webhooks that use it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_WEBHOOKS, thread_name_prefix="webhook-names")

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        """Return the addresses of a host name."""
        found = await asyncio.get_running_loop().run_in_executor(self._threads, _look_up, host, port)
        return found[:MAX_ADDRESSES]

    def close(self) -> None:
        """Start no further resolutions; the running ones end on their own."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def select_addresses(addresses: Sequence[str], allowed: Sequence[Network], *, is_secure: bool) -> list[str]:
    """Return those of a host's addresses that a webhook may reach. Raises `PermissionError` if there is no such one.

    Without TLS only addresses in the allowed networks may be reached.
    """
    selected = [text for text in addresses if _may_reach(_parse(text), allowed, is_secure=is_secure)]
    if selected:
        return selected
    shown = addresses[0] if addresses else "(none)"
    problem = "is not a public address" if is_secure else "may not be reached without TLS"
    raise PermissionError(f"{shown} {problem}; --webhook-network of the server can allow its network")


def _may_reach(address: Address, allowed: Sequence[Network], *, is_secure: bool) -> bool:
    if any(address in network for network in allowed):
        return True
    return is_secure and _is_public(address)


def _is_public(address: Address) -> bool:
    """Return whether an address is one of a public host. Those that embed an IPv4 address are as public as that one."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.sixtofour or (address.teredo[1] if address.teredo is not None else None)
        if address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return _is_public(embedded)
        if address.is_site_local or address in _LOCAL_NAT64:
            return False
    if any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _parse(text: str) -> Address:
    address = ipaddress.ip_address(text.partition("%")[0])  # without the zone of a link-local address
    return getattr(address, "ipv4_mapped", None) or address
