"""Encrypted shares from one client to another, which the server forwards but cannot read.

Step 2 (ShareKeys) of Bonawitz et al. 2017, Figure 4: authenticated encryption under a key that both clients agree on.
"""

from __future__ import annotations

import dataclasses

from fedplat.secure_aggregation import shamir
from fedplat.secure_aggregation.messages import SHARE_BYTES
from fedplat.secure_aggregation.primitives import KeyPair, decrypt, derive_key, encrypt


@dataclasses.dataclass(frozen=True)
class SharePair:
    """One holder's shares of the two secrets of a client: of the seed of its own mask, and of its masking key."""

    seed: bytes = dataclasses.field(repr=False)
    key: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class ShareLink:
    """The way of a message within an attempt: from the position of its sender to that of its holder."""

    context: bytes
    sender: int
    holder: int

    def seal(self, own: KeyPair, peer: bytes, shares: SharePair) -> bytes:
        """Encrypt shares at their sender. Raises `SecureAggregationError` for a weak key of the holder."""
        return encrypt(self._derive_key(own, peer), shares.seed + shares.key, self._data)

    def open(self, own: KeyPair, peer: bytes, sealed: bytes) -> SharePair:
        """Decrypt shares at their holder. Raises `SecureAggregationError` if they are not those of this link."""
        plaintext = decrypt(self._derive_key(own, peer), sealed, self._data)
        shares = SharePair(plaintext[:SHARE_BYTES], plaintext[SHARE_BYTES:])
        shamir.read_share(shares.seed)
        shamir.read_share(shares.key)
        return shares

    @property
    def _data(self) -> bytes:
        return self.context + self.sender.to_bytes(4, "big") + self.holder.to_bytes(4, "big")

    def _derive_key(self, own: KeyPair, peer: bytes) -> bytes:
        return derive_key(own.agree(peer), "fedplat shares 1", self.context, (self.sender, self.holder))
