"""A random rotation that spreads each entry of an update over all, so that no entry of a sum is large.

A Hadamard transform needs a power of two. Instead of padding, the first 2^k entries are transformed, and then the last
2^k, each with random signs before. The signs are public, and the same for all updates of a length.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from fedplat.codecs.hadamard import hadamard
from fedplat.model import Vector
from fedplat.privacy.noise import KeyStream


def rotate(vector: Vector) -> None:
    """Rotate a vector in place."""
    for part, flips in _steps(vector):
        _flip(part, flips)
        _transform(part)


def rotate_back(vector: Vector) -> None:
    """Undo `rotate`, in place."""
    for part, flips in reversed(_steps(vector)):
        _transform(part)
        _flip(part, flips)


def _steps(vector: Vector) -> list[tuple[Vector, npt.NDArray[np.uint32]]]:
    """Return the parts that are transformed one after the other, each with the sign bits to flip."""
    count = 1 << (vector.size.bit_length() - 1)
    parts = [vector[:count]] if count == vector.size else [vector[:count], vector[-count:]]
    stream = KeyStream(hashlib.sha256(b"fedplat rotation 1 %d" % vector.size).digest())
    return [(part, _draw_flips(stream, count)) for part in parts]


def _draw_flips(stream: KeyStream, count: int) -> npt.NDArray[np.uint32]:
    """Draw random sign bits of float32 numbers: the highest bit or 0."""
    flips = np.unpackbits(stream.words(-(-count // 32)).view(np.uint8), count=count).astype(np.uint32)
    flips <<= np.uint32(31)
    return flips


def _flip(part: Vector, flips: npt.NDArray[np.uint32]) -> None:
    bits = part.view(np.uint32)
    bits ^= flips


def _transform(part: Vector) -> None:
    """Multiply by the normalized Hadamard matrix, its own inverse: over the columns of a table, then over its rows."""
    exponent = part.size.bit_length() - 1
    table = np.multiply(part.reshape(1 << exponent // 2, -1), np.float32(2.0 ** (-exponent / 2)))
    table = hadamard(np.ascontiguousarray(hadamard(table).T))
    part.reshape(table.shape[::-1])[:] = table.T
