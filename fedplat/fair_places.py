"""Few places for many callers whom one does not know: the greediest network waits longest, and gives way first.

A caller is known by its groups, the widest first: with IPv6 the /48, the /56 and the /64 of its address, since one host
may own all of these (RFC 6177), then its connection. Whatever has to choose between callers chooses by group: it takes
the widest group with the most members, in it the next one, and in the last group the oldest member. So a host with many
connections, or a network with many addresses, only takes from itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import ipaddress
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Protocol, TypeVar

IPV6_PREFIX = 64
"""The network of a single caller with IPv6."""
WIDE_PREFIXES = (48, 56)
"""The networks that one customer of a provider may own."""
_CACHED = 4096
Groups = tuple[str, ...]


class Grouped(Protocol):
    """A caller that has a place, or waits for one."""

    @property
    def groups(self) -> Groups:
        """The groups of the caller, the widest first."""
        ...


_Member = TypeVar("_Member", bound=Grouped)


@functools.lru_cache(_CACHED)
def groups_of(address: str) -> Groups:
    """Return the groups of an address: its networks, the widest first. The last one is that of a single caller.

    >>> groups_of("2001:db8:1:2fe::7")
    ('2001:db8:1::/48', '2001:db8:1:200::/56', '2001:db8:1:2fe::/64')
    >>> groups_of("192.0.2.7"), groups_of("::ffff:192.0.2.7"), groups_of("unix:")
    (('192.0.2.7',), ('192.0.2.7',), ('unix:',))
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return (address[:100],)
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    if parsed.version == 4:
        return (str(parsed),)
    return tuple(str(ipaddress.ip_network((parsed, prefix), strict=False)) for prefix in (*WIDE_PREFIXES, IPV6_PREFIX))


def find_greediest(members: Iterable[_Member]) -> _Member:
    """Return the oldest member of the greediest group. `members` are in the order of their age, at least one.

    Of groups with equally many members, the one with the oldest member counts as the greediest.
    """
    found, level = list(members), 0
    while True:
        counts = Counter(member.groups[level : level + 1] for member in found)
        (group, _), *_ = counts.most_common(1)
        if not group:
            return found[0]
        found = [member for member in found if member.groups[level : level + 1] == group]
        level += 1


class PlacesFullError(Exception):
    """There was no place for a caller, or it lost its place to others; the message has the reason."""


class TooSlowError(Exception):
    """A caller did not finish in time what it had a place for."""


@dataclasses.dataclass(frozen=True)
class PlaceLimits:
    """How many callers may have a place, and for how long.

    `total`: of all callers. `per_network`: of one network. `per_connection`: of one connection, whose further
    `waiting_per_connection` callers wait. `waiting_per_network`: how many wait of one network. `wait_s`: the longest
    wait. `hold_s`: how long a place may be held; if others wait for it, only `share_s`.
    """

    total: int
    per_network: int
    waiting_per_network: int
    wait_s: float
    hold_s: float = math.inf
    share_s: float = math.inf
    per_connection: int = 2**31
    waiting_per_connection: int = 2**31


@dataclasses.dataclass(eq=False)
class _Caller:
    groups: Groups
    network: str
    connection: str
    since: float = 0.0
    turn: asyncio.Future[None] | None = None
    scope: asyncio.Timeout | None = None
    is_ended: bool = False


class _Turns:
    """Those who wait, in turns: one of each group, then one of each again; in a group likewise."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, _Turns] = OrderedDict()
        self._callers: OrderedDict[_Caller, None] = OrderedDict()

    def add(self, caller: _Caller, level: int = 0) -> None:
        if level == len(caller.groups):
            self._callers[caller] = None
        else:
            self._groups.setdefault(caller.groups[level], _Turns()).add(caller, level + 1)

    def remove(self, caller: _Caller, level: int = 0) -> None:
        if level == len(caller.groups):
            del self._callers[caller]
            return
        group = self._groups[caller.groups[level]]
        group.remove(caller, level + 1)
        if group.is_empty:
            del self._groups[caller.groups[level]]

    @property
    def is_empty(self) -> bool:
        return not self._groups and not self._callers

    def next(self, is_full: Callable[[str], bool]) -> _Caller | None:
        """Return the one whose turn it is, passing over groups that are full; its groups come last from now on."""
        for name, group in self._groups.items():
            if not is_full(name) and (found := group.next(is_full)) is not None:
                self._groups.move_to_end(name)
                return found
        return next(iter(self._callers), None)


class FairPlaces:
    """The places of callers. `limits` returns the limits to apply, which may change."""

    def __init__(self, limits: Callable[[], PlaceLimits]) -> None:
        self._limits = limits
        self._holders: dict[_Caller, None] = {}
        self._held: Counter[str] = Counter()
        self._turns = _Turns()
        self._waiting: dict[str, dict[_Caller, None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """The number of callers that have a place."""
        return len(self._holders)

    @property
    def num_waiting(self) -> int:
        """The number of callers that wait for one."""
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def place(self, groups: Groups, connection: str = "") -> AsyncGenerator[None]:
        """Wait for a place, and hold it. The last of `groups` is the network; `connection` may be unknown ("").

        Raises `PlacesFullError` if too many wait, or if this caller gave its place to others, and `TooSlowError`.
        """
        caller = _Caller((*groups, connection) if connection else groups, groups[-1], connection)
        try:
            async with asyncio.timeout(self._limits().wait_s):
                await self._enter(caller)
        except TimeoutError as exc:
            raise PlacesFullError("too many others were sending") from exc
        hold_s = self._limits().hold_s
        try:
            async with asyncio.timeout(None if hold_s == math.inf else hold_s) as scope:
                caller.scope = scope
                if caller.is_ended:
                    raise TimeoutError
                yield
        except TimeoutError as exc:
            if caller.is_ended:
                raise PlacesFullError("others waited for its place") from exc
            if caller.scope is None or not caller.scope.expired():
                raise
            raise TooSlowError(f"it was not complete after {hold_s:g} s") from exc
        finally:
            self._leave(caller)

    async def _enter(self, caller: _Caller) -> None:
        if self._has_room(caller):
            self._take(caller)
            return
        caller.turn = asyncio.get_running_loop().create_future()
        self._queue(caller)
        oldest = next(iter(self._holders)).since if self._holders else 0.0
        self._arm(max(oldest + self._limits().share_s - asyncio.get_running_loop().time(), 0.0))
        try:
            await caller.turn
        except BaseException:
            if caller in self._holders:  # its turn came at the moment of the cancellation
                self._leave(caller)
            else:
                self._unqueue(caller)
            raise

    def _has_room(self, caller: _Caller) -> bool:
        limits = self._limits()
        return (
            len(self._holders) < limits.total
            and self._held[caller.network] < limits.per_network
            and (not caller.connection or self._held[caller.connection] < limits.per_connection)
        )

    def _take(self, caller: _Caller) -> None:
        caller.since = asyncio.get_running_loop().time()
        self._holders[caller] = None
        self._held.update({caller.network, caller.connection} - {""})

    def _leave(self, caller: _Caller) -> None:
        del self._holders[caller]
        for name in {caller.network, caller.connection} - {""}:
            self._held[name] -= 1
            if not self._held[name]:
                del self._held[name]
        self._grant()

    def _grant(self) -> None:
        """Give the free places to those whose turn it is."""
        limits = self._limits()

        def is_full(name: str) -> bool:
            if name in self._waiting:
                return self._held[name] >= limits.per_network
            return self._held[name] >= limits.per_connection

        while len(self._holders) < limits.total and (caller := self._turns.next(is_full)) is not None:
            self._unqueue(caller)
            assert caller.turn is not None
            if not caller.turn.done():
                self._take(caller)
                caller.turn.set_result(None)
        if self._waiting:
            self._arm(limits.share_s)

    def _queue(self, caller: _Caller) -> None:
        """Let a caller wait. If too many of its network do, the greediest of them, maybe itself, waits no longer."""
        limits = self._limits()
        of_network = self._waiting.setdefault(caller.network, {})
        same = sum(other.connection == caller.connection for other in of_network) if caller.connection else 0
        if same >= limits.waiting_per_connection:
            raise PlacesFullError("too many calls of this connection wait to send")
        of_network[caller] = None
        self._turns.add(caller)
        if len(of_network) > limits.waiting_per_network:
            greediest = find_greediest(of_network)
            assert greediest.turn is not None
            self._unqueue(greediest)
            if not greediest.turn.done():
                greediest.turn.set_exception(PlacesFullError("too many calls of this network wait to send"))

    def _unqueue(self, caller: _Caller) -> None:
        of_network = self._waiting.get(caller.network, {})
        if caller in of_network:
            del of_network[caller]
            self._turns.remove(caller)
        if not of_network:
            self._waiting.pop(caller.network, None)

    def _arm(self, delay_s: float) -> None:
        """Look at the places again after a delay, unless that will happen anyway, or places are never taken away."""
        if self._timer is None and self._limits().share_s != math.inf:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._press)

    def _press(self) -> None:
        """End the places of the greediest for those who wait, once each has had its share of time."""
        self._timer = None
        delay_s = self._limits().share_s
        for group, waiting in self._find_demand().items():
            holders = [one for one in self._holders if not group or group in (one.network, one.connection)]
            staying = [one for one in holders if not one.is_ended]
            num_free = len(holders) - len(staying)
            staying += waiting[:num_free]
            for caller in waiting[num_free:]:
                left_s = self._end_greediest([*staying, caller])
                if left_s > 0.0:
                    delay_s = min(delay_s, left_s)
                    break
                staying = [one for one in (*staying, caller) if not one.is_ended]
        if self._waiting and delay_s > 0.0:
            self._arm(delay_s)

    def _end_greediest(self, callers: list[_Caller]) -> float:
        """End the place of the greediest caller; or return in how many seconds that may be done.

        The last of `callers` waits, and counts as if it had a place: so it takes one of its own network before it takes
        the only one of another.
        """
        now, share_s = asyncio.get_running_loop().time(), self._limits().share_s
        greediest = find_greediest(callers)
        if greediest not in self._holders:  # it waits, too
            return share_s
        if (left_s := greediest.since + share_s - now) <= 0.0:
            greediest.is_ended = True
            if greediest.scope is not None:
                greediest.scope.reschedule(now)
        return left_s

    def _find_demand(self) -> dict[str, list[_Caller]]:
        """Return those who wait for a place in each of the groups that are full ("": all places are taken)."""
        limits = self._limits()
        demand: dict[str, list[_Caller]] = {}
        for network, callers in self._waiting.items():
            is_full = self._held[network] >= limits.per_network
            for one in callers:
                is_own = self._held[one.connection] >= limits.per_connection
                group = network if is_full else one.connection if is_own else ""
                demand.setdefault(group, []).append(one)
        return demand
