"""The clocks of the clients of a stale synchronous parallel job, as a frozen record. Pure functions.

The clock of a client is the number of its updates that versions contain, counted from the clock at which it joined
(Ho et al. 2013, NIPS, section 3). The members of the set are the clients that train or are expected to; all others have
left it, and no one waits for them.

A client that joins gets the minimum clock of the set. With less, all others would wait until it has caught up, although
its updates are no part of what they wait for; the bound would not hold either. With more, it would be allowed to train
while the others are ahead of it for nothing. A client that has left ahead of the minimum gets its own clock back, for
otherwise leaving would be a way around the bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import msgspec
from msgspec import Struct, field, structs

from fedplat.decoding import prepare_type


class ClockSet(Struct, frozen=True):
    """The clocks of the members, and of the clients that have left ahead of the minimum (`ahead`).

    `minimum` is the smallest clock of the members; it never decreases, and an empty set keeps its last one. Members
    without work are expected to take part again until the moments in `expected`, which are not stored.

    >>> clocks = ClockSet().join("a").join("b").tick("a").tick("a").tick("b")
    >>> clocks.minimum, clocks.maximum, dict(clocks.leave(["a"]).join("c").join("a").clocks)
    (1, 2, {'b': 1, 'c': 1, 'a': 2})
    """

    clocks: dict[str, int] = field(default_factory=dict[str, int])
    ahead: dict[str, int] = field(default_factory=dict[str, int])
    minimum: int = 0
    expected: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def maximum(self) -> int:
        """The largest clock of the members; the minimum of an empty set."""
        return max(self.clocks.values(), default=self.minimum)

    @property
    def next_expected(self) -> float | None:
        """The first moment at which a member without work may have to leave."""
        return min(self.expected.values(), default=None)

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
        left = structs.replace(self, ahead={**self.ahead, **gone})
        return left._settle(staying, expected)

    def expect(self, client_ids: Iterable[str], until: float) -> Self:
        """Expect members without work to take part again until a moment."""
        expected = {name: until for name in client_ids if name in self.clocks}
        return structs.replace(self, expected={**self.expected, **expected}) if expected else self

    def _settle(self, clocks: dict[str, int], expected: dict[str, float]) -> Self:
        """Return the set with other clocks: update its minimum, and forget who left and is no longer ahead of it."""
        minimum = min(clocks.values(), default=self.minimum)
        ahead = {name: c for name, c in self.ahead.items() if clocks and c > minimum and name not in clocks}
        return structs.replace(self, clocks=clocks, ahead=ahead, minimum=minimum, expected=expected)


def clocks_to_builtins(clocks: ClockSet) -> dict[str, Any] | None:
    """Return what is stored of a clock set, in a form for JSON; None for a set that has never had a member."""
    stored = {"clocks": dict(clocks.clocks), "ahead": dict(clocks.ahead), "minimum": clocks.minimum}
    return stored if any(stored.values()) else None


def clocks_from_builtins(stored: object) -> ClockSet:
    """Return a clock set from its stored form. Raises `msgspec.ValidationError` if it has none."""
    return NO_CLOCKS if stored is None else msgspec.convert(stored, prepare_type(ClockSet))


NO_CLOCKS = ClockSet()
"""The clock set of a job that has not begun, or that has another mode."""
