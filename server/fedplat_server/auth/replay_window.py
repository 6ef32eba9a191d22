"""Replay protection: accepts each number of a sequence once, in any order.

The window is that of IPsec's anti-replay service (RFC 4303, section 3.4.3): numbers below it are refused.
"""

from __future__ import annotations

import dataclasses

SIZE = 1024
"""How far behind the newest call a call may be. A client has far fewer calls under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayWindow:
    """The highest number seen, and a bit set of the `SIZE` numbers up to it that were seen (bit 0: the highest)."""

    highest: int = 0
    seen: int = 1  # no call has the number 0

    def accept(self, number: int) -> ReplayWindow | None:
        """Return the window with this number added; None if the number was seen, or is below the window."""
        if number > self.highest:
            shift = number - self.highest
            kept = (self.seen << shift) & _MASK if shift < SIZE else 0
            return ReplayWindow(number, kept | 1)
        age = self.highest - number
        if number < 0 or age >= SIZE or self.seen >> age & 1:
            return None
        return ReplayWindow(self.highest, self.seen | 1 << age)


_MASK = (1 << SIZE) - 1
