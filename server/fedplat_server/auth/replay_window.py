"""Which numbers of a sequence were seen: each is accepted once, also when they come in another order.

The window is that of IPsec's protection against replays (RFC 4303, section 3.4.3): what lies below it is refused.
"""

from __future__ import annotations

import dataclasses

SIZE = 1024
"""How far behind the newest call another one may come. A client has far fewer calls under way."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayWindow:
    """The highest number that was seen, and, as bits, which of the `SIZE` numbers up to it were (bit 0: itself)."""

    highest: int = 0
    seen: int = 1  # 0 is no number of a call

    def accept(self, number: int) -> ReplayWindow | None:
        """The window with this number in it; None if it was seen before, or is too old to tell."""
        if number > self.highest:
            shift = number - self.highest
            kept = (self.seen << shift) & _MASK if shift < SIZE else 0
            return ReplayWindow(number, kept | 1)
        age = self.highest - number
        if number < 0 or age >= SIZE or self.seen >> age & 1:
            return None
        return ReplayWindow(self.highest, self.seen | 1 << age)


_MASK = (1 << SIZE) - 1
