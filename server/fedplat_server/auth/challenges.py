"""Nonces that prove that a signature is fresh. Any caller may request one; each is accepted once.

A nonce is a timestamp, 16 random bytes and a MAC over both, so that issuing millions costs the server no memory. It
only remembers used nonces, until they expire. Times are seconds of a monotonic clock.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict

VALID_S = 120.0
MAX_USED = 100_000
RANDOM_BYTES = 16
_TIME_BYTES = 8
_MAC_BYTES = 32
_SIZE = _TIME_BYTES + RANDOM_BYTES + _MAC_BYTES


class Challenges:
    """Issues nonces and accepts each once. `key`: the MAC's key, 32 random bytes that only this process has."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._used: OrderedDict[bytes, int] = OrderedDict()
        self._floor_ms = 0

    def new(self, now: float, random: bytes) -> bytes:
        """Return a nonce made from `RANDOM_BYTES` random bytes."""
        body = int(now * 1000).to_bytes(_TIME_BYTES, "big") + random
        return body + self._mac(body)

    def redeem(self, nonce: bytes, now: float) -> bool:
        """Use up a nonce; return whether this server issued it and it is neither expired nor used."""
        body, mac = nonce[:-_MAC_BYTES], nonce[-_MAC_BYTES:]
        if len(nonce) != _SIZE or not hmac.compare_digest(mac, self._mac(body)):
            return False
        made_ms, now_ms = int.from_bytes(body[:_TIME_BYTES], "big"), int(now * 1000)
        self._forget(now_ms)
        if made_ms < max(self._floor_ms, now_ms - VALID_S * 1000) or body in self._used:
            return False
        self._used[body] = made_ms
        if len(self._used) > MAX_USED:
            # A nonce that is forgotten here could be used again: refuse all that are as old.
            _, oldest_ms = self._used.popitem(last=False)
            self._floor_ms = max(self._floor_ms, oldest_ms + 1)
        return True

    def _forget(self, now_ms: int) -> None:
        while self._used and next(iter(self._used.values())) < now_ms - VALID_S * 1000:
            self._used.popitem(last=False)

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")
