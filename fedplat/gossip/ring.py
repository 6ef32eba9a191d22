"""Ring all-reduce with pairwise masks: all silos get the mean, and no silo sees another's model.

Each model becomes integers (`mixing.py`), plus one mask for each other silo, which cancel in the sum: of two silos
the first adds the key stream of their common key and the second subtracts it, as in `secure_aggregation.masks`. The
masked vector has one chunk for each silo. In n - 1 steps each silo adds its part to the chunk that it gets and passes
it on (reduce-scatter), and in n - 1 more the complete chunks go round (all-gather): 2 (n - 1) / n of the vector's bytes
(Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms", Section 4).

A partial sum has masks that it shares with the silos that are not in it, so it is uniformly random to all that do not
have the keys of those pairs: private is each model, public to the silos are the mean, the shares and the bound. If all
silos but two work together, they learn the sum of these two. Masks need fresh keys for each attempt. A member must get
the keys of others from one that it trusts to name the members: a coordinator that gives out its own keys in place of
theirs and reads the traffic between silos, which is encrypted (mTLS), would see models.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from fedplat.gossip import messages, mixing
from fedplat.model import Vector
from fedplat.secure_aggregation import primitives, setup

_ROUNDING = 1e-6


def key_payload(job_id: str, round_number: int, attempt: int, silo: str, key: bytes) -> bytes:
    """Return what a silo signs with the key with which it is enrolled, for its key of an attempt."""
    numbers = round_number.to_bytes(8, "big"), attempt.to_bytes(8, "big")
    return setup.hash_parts(b"fedplat ring key 1", job_id.encode(), *numbers, silo.encode(), key)


class Ring(Struct, frozen=True, kw_only=True):
    """An attempt at a ring: what all its members agree on. `size` is the number of entries of a model."""

    job_id: str
    round: int
    attempt: int
    members: Annotated[tuple[messages.RingPlace, ...], Meta(min_length=2, max_length=messages.MAX_RING)]
    bound: float
    size: Annotated[int, Meta(ge=1)]

    @property
    def num_steps(self) -> int:
        """The number of messages that each silo sends, and gets."""
        return 2 * (len(self.members) - 1)

    @property
    def context(self) -> bytes:
        """A digest of the attempt, which is bound into every key of a mask."""
        digest = hashlib.sha256(b"fedplat ring context 1")
        texts = [self.job_id, str(self.round), str(self.attempt), str(self.size), repr(self.bound)]
        parts = [text.encode() for text in texts]
        for member in self.members:
            parts += [member.silo.encode(), member.key, repr(member.share).encode()]
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def chunk(self, number: int) -> slice:
        """Return the entries of a chunk; chunks are in order and differ by one entry at most."""
        count, number = len(self.members), number % len(self.members)
        return slice(number * self.size // count, (number + 1) * self.size // count)


class RingMember:
    """One silo's part in an attempt. `key` is its fresh key pair, whose public key is on the ring.

    In each step from 0 the silo sends `outgoing(step)` to the silo after it, and passes what comes from the one before
    it to `receive`; after the last step it has the `mean`. Raises `ValueError` for a ring on which it is not, or twice,
    for shares that do not add up to 1 and for a model that does not fit, and `SecureAggregationError` for a weak key of
    another silo.
    """

    def __init__(self, ring: Ring, silo: str, key: primitives.KeyPair, model: Vector) -> None:
        names = [member.silo for member in ring.members]
        keys = [member.key for member in ring.members]
        if len(set(names)) < len(names) or len(set(keys)) < len(keys):
            raise ValueError("a silo or a key is on the ring more than once")
        if silo not in names or keys[names.index(silo)] != key.public:
            raise ValueError(f"{silo} is not on the ring with the key that it offered")
        if model.shape != (ring.size,):
            raise ValueError(f"the model has shape {model.shape}; expected ({ring.size},)")
        for each in keys:
            primitives.check_public_key(each)
        total = math.fsum(member.share for member in ring.members)
        if not abs(total - 1.0) <= _ROUNDING:
            raise ValueError(f"the shares of the silos add up to {total}; expected 1, because more could overflow")
        self._ring, self._position, self._step = ring, names.index(silo), 0
        share = ring.members[self._position].share
        self._values: mixing.Integers = mixing.quantize_share(model, share, ring.bound, len(names))
        self._mask(key, keys)

    def _mask(self, key: primitives.KeyPair, keys: Sequence[bytes]) -> None:
        own, context = self._position, self._ring.context
        pairs = {
            other: primitives.derive_pair_key(key, public, context, (own, other))
            for other, public in enumerate(keys)
            if other != own
        }
        added = [each for other, each in pairs.items() if own < other]
        subtracted = [each for other, each in pairs.items() if own > other]
        primitives.apply_masks(self._values, 32, added, subtracted)

    def outgoing(self, step: int) -> bytes:
        """Return the chunk to send in a step, after those before it were received."""
        self._check(step)
        return self._values[self._ring.chunk(self._position - step)].astype("<u4", copy=False).tobytes()

    def receive(self, step: int, content: bytes) -> None:
        """Process the chunk of a step. Raises `ValueError` unless it has the right size, and comes in its turn."""
        self._check(step)
        chunk = self._values[self._ring.chunk(self._position - step - 1)]
        if len(content) != chunk.nbytes:
            raise ValueError(f"the chunk of step {step} has {len(content)} bytes; expected {chunk.nbytes}")
        received = np.frombuffer(content, "<u4")
        if step < len(self._ring.members) - 1:
            np.add(chunk, received, out=chunk)
        else:
            chunk[:] = received
        self._step += 1

    def _check(self, step: int) -> None:
        if step != self._step or step >= self._ring.num_steps:
            raise ValueError(f"step {step} is not in its turn; expected {self._step} of {self._ring.num_steps}")

    def mean(self) -> Vector:
        """Return the mean, after the last step: float32, the same bits at all silos."""
        if self._step < self._ring.num_steps:
            raise ValueError(f"the ring is at step {self._step} of {self._ring.num_steps}; expected the last one")
        return mixing.read_integer_mean(self._values, self._ring.bound, len(self._ring.members))

    def digest(self) -> str:
        """Return the digest of the mean."""
        return mixing.digest_mean(self.mean())

    def chunk_digests(self) -> tuple[str, ...]:
        """Return a digest of each complete chunk, in order: 128 bits, after the last step."""
        chunks = [self._values[self._ring.chunk(number)] for number in range(len(self._ring.members))]
        return tuple(hashlib.sha256(chunk.astype("<u4", copy=False).tobytes()).hexdigest()[:32] for chunk in chunks)
