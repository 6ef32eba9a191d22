"""What rules compute of an update that is read block by block: its norm, and multiples of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedplat.model import BLOCK, Blocks, Vector


def l2_norm(vector: Blocks) -> float:
    """The Euclidean norm of a float32 vector, summed in float64; the same bits on every machine."""
    wide = np.empty(min(BLOCK, vector.size), np.float64)
    total = 0.0
    for block in vector:
        squares = wide[: block.size]
        squares[:] = block
        # Not np.dot: BLAS sums in an order that depends on the processor and its number of threads.
        total += float(np.square(squares, out=squares).sum())
    return math.sqrt(total)


def scaled(vector: Blocks, factor: float) -> Blocks:
    """A vector times a factor (as a float32), computed block by block as it is read; times 1, the vector itself."""
    return vector if factor == 1 else _Scaled(vector, np.float32(factor))


class _Scaled:
    def __init__(self, vector: Blocks, factor: np.float32) -> None:
        self._vector = vector
        self._factor = factor

    @property
    def size(self) -> int:
        return self._vector.size

    def __iter__(self) -> Iterator[Vector]:
        scratch = np.empty(min(BLOCK, self.size), np.float32)
        for block in self._vector:
            yield np.multiply(block, self._factor, out=scratch[: block.size])
