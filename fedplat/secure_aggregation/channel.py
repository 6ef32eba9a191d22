"""Encrypted shares from one client to another, which the server forwards but cannot read.

Step 2 (ShareKeys) of Bonawitz et al. 2017, Figure 4: authenticated encryption under a key that both clients agree on.
"""

from __future__ import annotations

import dataclasses

from fedplat.secure_aggregation import messages, primitives, shamir


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

    def seal(self, own: primitives.KeyPair, peer: bytes, shares: SharePair) -> bytes:
        """Encrypt shares at their sender. Raises `SecureAggregationError` for a weak key of the holder."""
        return primitives.encrypt(self._derive_key(own, peer), shares.seed + shares.key, self._data)

    def open(self, own: primitives.KeyPair, peer: bytes, sealed: bytes) -> SharePair:
        """Decrypt shares at their holder. Raises `SecureAggregationError` if they are not those of this link."""
        plaintext = primitives.decrypt(self._derive_key(own, peer), sealed, self._data)
        shares = SharePair(plaintext[: messages.SHARE_BYTES], plaintext[messages.SHARE_BYTES :])
        shamir.read_share(shares.seed)
        shamir.read_share(shares.key)
        return shares

    @property
    def _data(self) -> bytes:
        return self.context + self.sender.to_bytes(4, "big") + self.holder.to_bytes(4, "big")

    def _derive_key(self, own: primitives.KeyPair, peer: bytes) -> bytes:
        return primitives.derive_key(own.agree(peer), "fedplat shares 1", self.context, (self.sender, self.holder))
