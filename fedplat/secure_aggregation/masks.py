"""Masks: key streams that look like uniform random numbers, and that cancel out in a sum.

Step 3 (MaskedInputCollection) of Bonawitz et al. 2017, Figure 4. A mask is the stream of AES-256 in counter mode, from
counter 0, as little-endian 32-bit numbers modulo 2^modulus. All values of an entry are equally likely, because
2^modulus divides 2^32.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.errors import SecureAggregationError
from fedplat.secure_aggregation.primitives import AES_BLOCK, KeyPair, derive_key, open_stream

Vector: TypeAlias = npt.NDArray[np.uint32]

_BLOCK = 1 << 15
"""Entries that are masked at a time: they, the key stream and its zeros stay in the second-level cache of a core."""
_STREAMS = 256
"""Maximum number of streams that are open at a time."""
_ZEROS = memoryview(bytes(4 * _BLOCK))


def derive_pair_key(own: KeyPair, peer: bytes, context: bytes, pair: tuple[int, int]) -> bytes:
    """Derive the key of the mask that two positions share; both derive the same.

    Raises `SecureAggregationError` for a weak public key of the peer.
    """
    return derive_key(own.agree(peer), "fedplat pair mask 1", context, (min(pair), max(pair)))


def derive_own_key(seed: bytes, context: bytes, position: int) -> bytes:
    """Derive the key of a position's own mask from its seed."""
    return derive_key(seed, "fedplat own mask 1", context, (position, position))


def commit_seed(seed: bytes, context: bytes, position: int) -> bytes:
    """Return a digest by which the server recognises the seed of a position's own mask."""
    return hashlib.sha256(b"fedplat seed 1\0" + context + position.to_bytes(4, "big") + seed).digest()


def apply_masks(
    vector: Vector, modulus: int, added: Sequence[bytes], subtracted: Sequence[bytes], workers: int = 1
) -> None:
    """Add the masks of some keys to a vector modulo 2^modulus, and subtract those of others, in place.

    `workers` threads work on one part of the vector each; ciphers and additions release the interpreter lock.
    """
    check_vector(vector, modulus)
    keys = [*((key, np.add) for key in added), *((key, np.subtract) for key in subtracted)]
    step = -(-len(vector) // (workers * _BLOCK)) * _BLOCK
    parts = [(first, vector[first : first + step]) for first in range(0, len(vector), step)]
    if len(parts) == 1:
        _apply_to_part(0, vector, modulus, keys)
        return
    with concurrent.futures.ThreadPoolExecutor(len(parts), "masks") as pool:
        for done in [pool.submit(_apply_to_part, first, part, modulus, keys) for first, part in parts]:
            done.result()


def check_vector(vector: Vector, modulus: int) -> None:
    """Raise `SecureAggregationError` unless masks can be added to a vector in place."""
    if not 8 <= modulus <= 32:
        raise SecureAggregationError(f"the modulus has {modulus} bits; expected 8 to 32")
    if vector.dtype != np.uint32 or vector.ndim != 1 or not vector.size:
        raise SecureAggregationError(
            f"the vector has the type {vector.dtype} and the shape {vector.shape}; expected uint32 and one dimension"
        )


def _apply_to_part(first: int, part: Vector, modulus: int, keys: Sequence[tuple[bytes, np.ufunc]]) -> None:
    """Apply masks to the part of a vector that begins at its entry `first`."""
    room_bytes = bytearray(4 * _BLOCK + AES_BLOCK)  # older versions of the library ask for a block more than they write
    room = np.frombuffer(room_bytes, "<u4")
    for begin in range(0, len(keys), _STREAMS):
        batch = keys[begin : begin + _STREAMS]
        streams = [(open_stream(key, 4 * first // AES_BLOCK), operation) for key, operation in batch]
        for block in _blocks(part):
            for stream, operation in streams:
                stream.update_into(_ZEROS[: 4 * len(block)], room_bytes)
                operation(block, room[: len(block)], out=block)
    if modulus < 32:
        for block in _blocks(part):
            np.bitwise_and(block, np.uint32(2**modulus - 1), out=block)


def _blocks(part: Vector) -> Iterator[Vector]:
    for begin in range(0, len(part), _BLOCK):
        yield part[begin : begin + _BLOCK]
