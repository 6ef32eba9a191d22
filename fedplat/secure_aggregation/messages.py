"""The table `[secure_aggregation]`, and the messages of the protocol: the same bytes when sent, stored and hashed.

A position is the index of a client in its group. A share is of one secret for one holder, `SHARE_BYTES` long. Sizes are
bounded by `max_bytes`, which a receiver checks before it decodes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from fedplat import metrics
from fedplat.config.decoding import prepare_type
from fedplat.errors import SecureAggregationError

MAX_GROUP = 1000
"""Maximum number of clients that share masks with each other."""
MIN_GROUP = 3
"""Minimum number: from the sum of two updates, each client would know the other's."""

EXACT_MODULUS = 64
"""Bits of a masked entry of an exact sum (`setup.ExactEncoding`)."""
MODULI: Final[Collection[int]] = frozenset((*range(8, 33), EXACT_MODULUS))
"""Bits that a masked entry may have."""


def word_of(modulus: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the type of entries of so many bits in memory."""
    return np.dtype(np.uint64 if modulus == EXACT_MODULUS else np.uint32)


Finite = Annotated[float, Meta(ge=-1e30, le=1e30)]


class SecureAggregation(Struct, frozen=True, forbid_unknown_fields=True):
    """Secure aggregation: the server learns the sum of the updates, and no single update."""

    threshold: Annotated[float, Meta(gt=0.5, le=1.0)] = 2 / 3
    """Part of the clients that hold shares of a client's secrets (its neighbours and itself) whose answers remove its
    masks. If fewer answer, the attempt fails; if as many collude with the server, they can read its update."""
    neighbours: Annotated[int, Meta(ge=0, le=MAX_GROUP - 1)] = 0
    """Number of other clients that hold shares of each client's secrets, and share masks with it, even; 0: all others
    hold shares in a group of up to 100, and in a larger one enough for 10 % of clients that collude and 10 % that drop
    out; masks are shared with enough of them."""
    group: Annotated[int, Meta(ge=MIN_GROUP, le=MAX_GROUP)] = MAX_GROUP
    """Maximum number of clients in a group. A larger cohort is divided into groups of nearly equal size, of each of
    which the server learns the sum."""
    bits: Annotated[int, Meta(ge=2, le=24)] = 20
    """Bits of a quantized entry: the range from -`updates.clip_norm` to `updates.clip_norm` has 2^bits - 2 steps. With
    `privacy.trust = "none"` it has fewer if the sum with its noise would not fit `modulus`."""
    modulus: Annotated[int, Meta(ge=8, le=32)] = 32
    """Bits of a masked entry, which is what a client sends; the sum of the quantized entries has to fit."""
    step_s: Annotated[float, Meta(ge=0.01, le=31_536_000.0)] = 60.0
    """Time for each step of the protocol but the training and the upload, in seconds."""
    confirm: bool = False
    """Whether clients confirm to each other which of them have sent their update, before any mask is removed. It costs
    one more step, and protects against a server that tells different clients different things."""
    metrics: Annotated[dict[str, tuple[Finite, Finite]], Meta(max_length=100)] = {}
    """Lowest and highest value of each metric of clients, such as `metrics = { loss = [0.0, 5.0] }`: the server learns
    the mean of each. Other metrics are not sent."""

    def __post_init__(self) -> None:
        if self.neighbours % 2:
            raise ValueError(f"neighbours = {self.neighbours}: expected an even number")
        if self.neighbours >= self.group:
            raise ValueError(
                f"neighbours = {self.neighbours}: expected fewer than the clients of a group, {self.group}"
            )
        if self.bits >= self.modulus:
            raise ValueError(f"bits = {self.bits}: expected less than modulus, which is {self.modulus}")
        metrics.check_bounds(self.metrics, "metrics")


KEY_BYTES = 32
"""Length of a public key (X25519 and Ed25519), and of a secret that is shared."""
SIGNATURE_BYTES = 64
"""Length of an Ed25519 signature."""
SHARE_BYTES = 33
"""Length of a share of a secret: an element of a prime field above 2^256."""
SEALED_BYTES = 2 * SHARE_BYTES + 16
"""Length of the encrypted shares for one holder: of both secrets, and the authentication tag."""
_PER_MEMBER = 512
"""Bound on the bytes of a message for each client of its group."""

Position = Annotated[int, Meta(ge=0, lt=MAX_GROUP)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Signature = Annotated[bytes, Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
Share = Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Sealed = Annotated[bytes, Meta(min_length=SEALED_BYTES, max_length=SEALED_BYTES)]
_Message = TypeVar("_Message", bound="Message")


class Message(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of the messages."""

    def to_bytes(self) -> bytes:
        """Encode the message."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def from_bytes(cls: type[_Message], content: bytes) -> _Message:
        """Decode a message. Raises `SecureAggregationError`."""
        if len(content) > max_bytes(MAX_GROUP):
            raise SecureAggregationError(
                f"a message of {len(content)} bytes is not a {cls.__name__}; expected at most {max_bytes(MAX_GROUP)}"
            )
        try:
            return msgspec.msgpack.decode(content, type=prepare_type(cls))
        except msgspec.MsgspecError as exc:
            raise SecureAggregationError(f"the bytes are not a {cls.__name__}: {exc}") from exc


def max_bytes(size: int) -> int:
    """Return the bound on the bytes of any message in a group of `size` clients."""
    return 1024 + _PER_MEMBER * size


class KeyAdvertisement(Message, frozen=True):
    """Step 1, from a client: its public keys for this attempt.

    The signature is by the key with which it is enrolled, over the setup and both keys (`setup.keys_payload`).
    """

    encryption_key: Key
    masking_key: Key
    signature: Signature


class Member(Message, frozen=True):
    """A client of a group: its id, the public key with which it is enrolled, and its keys for this attempt."""

    client_id: Annotated[str, Meta(max_length=100)]
    public_key: Key
    keys: KeyAdvertisement


class Roster(Message, frozen=True):
    """Step 1, to all clients of a group: its members, in the order of their positions, and the receiver's position.

    Only `members` is the same for all, and is bound into the context.
    """

    members: Annotated[tuple[Member, ...], Meta(max_length=MAX_GROUP)]
    position: Position


class SealedShares(Message, frozen=True):
    """Step 2, from a client: the encrypted shares of its secrets, by the position of their holder.

    `commitment` is a digest of the seed of its own mask, from which the server sees whether shares recover the right
    one; the masking key has its public key for that.
    """

    shares: Annotated[dict[Position, Sealed], Meta(max_length=MAX_GROUP)]
    commitment: Key


class HeldShares(Message, frozen=True):
    """Step 2, to a client: the encrypted shares that it holds, by the position of their sender.

    Only clients that sent their shares continue: the senders are all neighbours whose masks it has to add.
    """

    shares: Annotated[dict[Position, Sealed], Meta(max_length=MAX_GROUP)]


class Survivors(Message, frozen=True):
    """Step 3, to a client: the positions whose updates are in the sum, and those that sent shares but no update."""

    survivors: Annotated[tuple[Position, ...], Meta(max_length=MAX_GROUP)]
    dropped: Annotated[tuple[Position, ...], Meta(max_length=MAX_GROUP)]


class Confirmation(Message, frozen=True):
    """Step 4, only with `confirm`, from a client: its signature of the survivors (`setup.survivors_payload`)."""

    signature: Signature


class UnmaskRequest(Message, frozen=True):
    """The last step, to a client: the survivors again and, with `confirm`, their confirmations by position."""

    survivors: Survivors
    confirmations: Annotated[dict[Position, Signature], Meta(max_length=MAX_GROUP)] = {}


class UnmaskAnswer(Message, frozen=True):
    """The last step, from a client: the shares that it holds, one of each peer.

    Those are of the seed of its own mask for a survivor, and of its masking key for a client that dropped out.
    """

    seed_shares: Annotated[dict[Position, Share], Meta(max_length=MAX_GROUP)]
    key_shares: Annotated[dict[Position, Share], Meta(max_length=MAX_GROUP)]
