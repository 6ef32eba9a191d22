"""The clocks of the clients of a stale synchronous parallel job, as a frozen record. Pure functions.

The clock of a client is the number of its updates that versions contain, counted from the clock at which it joined
(Ho et al. 2013, NIPS, section 3). The members of the set are the clients that train or are expected to; all others have
left it, and no one waits for them.

A client that joins gets the minimum clock of the set. With less, all others would wait until it has caught up, although
its updates are no part of what they wait for; the bound would not hold either. With more, it would be allowed to train
while the others are ahead of it for nothing. A client that has left ahead of the minimum gets its own clock back, for
otherwise leaving would be a way around the bound.

A client that leaves has made the others wait. So it rests before it may join again: for 1 clock of the minimum after
the first time, 2 after the second, then 4, 8 and so on. Otherwise one client that joins, does nothing and joins again
would hold all others back for a deadline in each clock. Each `CLEAN_CLOCKS` clocks after a rest forgive one time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import msgspec
from msgspec import Struct, field, structs

from fedplat.config.decoding import prepare_type, require_known

CLEAN_CLOCKS = 16
"""The clocks of the minimum after a client's rest that forgive it one of the times that it has left."""
MAX_LEFT = 10_000
"""The number of clients that a clock set remembers: beyond it the oldest lapses are forgotten, and no one new joins."""
_MAX_TIMES = 6
"""The longest rest is 32 clocks: a client that has been repaired is not kept away forever."""


class Lapse(NamedTuple):
    """How often a client has left, as far as that is not forgiven, and the minimum when it did so last."""

    times: int
    at: int

    @property
    def rests_until(self) -> int:
        """The minimum at which the client may join again."""
        return self.at + (1 << (self.times - 1))

    def count_at(self, minimum: int) -> int:
        """Return how often the client has left, without what is forgiven at a minimum."""
        return max(self.times - max(minimum - self.rests_until, 0) // CLEAN_CLOCKS, 0)


class ClockSet(Struct, frozen=True):
    """The clocks of the members, and of the clients that have left ahead of the minimum (`ahead`).

    `minimum` is the smallest clock of the members; it never decreases, and an empty set keeps its last one. Members
    without work are expected to take part again until the moments in `expected`, which are not stored. `lapses` has the
    clients that have left, the latest last.

    >>> clocks = ClockSet().join("a").join("b").tick("a").tick("a").tick("b")
    >>> clocks.minimum, clocks.maximum, dict(clocks.leave(["a"]).join("c").join("a").clocks)
    (1, 2, {'b': 1, 'c': 1, 'a': 2})
    >>> ClockSet().join("a").join("b").tick("a").leave(["b"]).list_resting()
    ['b']
    """

    clocks: dict[str, int] = field(default_factory=dict[str, int])
    ahead: dict[str, int] = field(default_factory=dict[str, int])
    minimum: int = 0
    expected: dict[str, float] = field(default_factory=dict[str, float])
    lapses: dict[str, Lapse] = field(default_factory=dict[str, Lapse])

    @property
    def maximum(self) -> int:
        """The largest clock of the members; the minimum of an empty set."""
        return max(self.clocks.values(), default=self.minimum)

    @property
    def next_expected(self) -> float | None:
        """The first moment at which a member without work may have to leave."""
        return min(self.expected.values(), default=None)

    @property
    def is_closed(self) -> bool:
        """True if no client may join that has not left ahead of the minimum: too many have, to remember more."""
        return len(self.ahead) >= MAX_LEFT

    def list_resting(self) -> list[str]:
        """Return the clients that have left and may not join yet."""
        return [
            name for name, lapse in self.lapses.items() if self.minimum < lapse.rests_until and name not in self.clocks
        ]

    def join(self, client_id: str) -> Self:
        """Add a client that is given work, at the minimum or at its own clock; a member is no longer expected."""
        expected = {name: moment for name, moment in self.expected.items() if name != client_id}
        if client_id in self.clocks:
            return structs.replace(self, expected=expected) if client_id in self.expected else self
        clock = max(self.ahead.get(client_id, 0), self.minimum)
        return self._settle({**self.clocks, client_id: clock}, expected)

    def tick(self, client_id: str) -> Self:
        """Count an update of a member that has become part of a version."""
        return self._settle({**self.clocks, client_id: self.clocks[client_id] + 1}, self.expected)

    def leave(self, client_ids: Iterable[str]) -> Self:
        """Remove clients that are members. When the last one leaves, no clock is left to be ahead of."""
        gone = {name: self.clocks[name] for name in client_ids if name in self.clocks}
        if not gone:
            return self
        staying = {name: clock for name, clock in self.clocks.items() if name not in gone}
        expected = {name: moment for name, moment in self.expected.items() if name not in gone}
        left = structs.replace(self, ahead={**self.ahead, **gone})._settle(staying, expected)
        return left._remember(gone) if staying else left

    def expect(self, client_ids: Iterable[str], until: float) -> Self:
        """Expect members without work to take part again until a moment."""
        expected = {name: until for name in client_ids if name in self.clocks}
        return structs.replace(self, expected={**self.expected, **expected}) if expected else self

    def _remember(self, gone: Iterable[str]) -> Self:
        """Return the set with one more lapse of each client that has left."""
        lapses = dict(self.lapses)
        for name in gone:
            last = lapses.pop(name, None)
            times = 1 + (last.count_at(self.minimum) if last is not None else 0)
            lapses[name] = Lapse(min(times, _MAX_TIMES), self.minimum)
        latest = itertools.islice(lapses.items(), max(len(lapses) - MAX_LEFT, 0), None)
        return structs.replace(self, lapses=dict(latest))

    def _settle(self, clocks: dict[str, int], expected: dict[str, float]) -> Self:
        """Return the set with other clocks: update its minimum, and forget who left and is no longer ahead of it.

        An empty set forgets all: no one is left who could be held back.
        """
        minimum = min(clocks.values(), default=self.minimum)
        ahead = {name: c for name, c in self.ahead.items() if clocks and c > minimum and name not in clocks}
        lapses = self.lapses
        if not clocks or minimum > self.minimum:
            lapses = {name: lapse for name, lapse in lapses.items() if clocks and lapse.count_at(minimum)}
        return structs.replace(self, clocks=clocks, ahead=ahead, minimum=minimum, expected=expected, lapses=lapses)


def clocks_to_builtins(clocks: ClockSet) -> dict[str, Any] | None:
    """Return what is stored of a clock set, in a form for JSON; None for a set that has never had a member."""
    stored = {
        "clocks": dict(clocks.clocks),
        "ahead": dict(clocks.ahead),
        "minimum": clocks.minimum,
        "lapses": {name: list(lapse) for name, lapse in clocks.lapses.items()},
    }
    return stored if any(stored.values()) else None


def clocks_from_builtins(stored: object) -> ClockSet:
    """Return a clock set from its stored form. Raises `msgspec.ValidationError` if it has none."""
    if stored is None:
        return NO_CLOCKS
    require_known(stored, ClockSet)
    return msgspec.convert(stored, prepare_type(ClockSet))


NO_CLOCKS = ClockSet()
"""The clock set of a job that has not begun, or that has another mode."""
