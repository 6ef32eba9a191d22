"""Norms and multiples of an update that is read block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fedplat.model import BLOCK, Blocks, Vector
from fedplat.model.shards import ShardReduce, Terms, single_shard


def l2_norm(vector: Blocks, reduce_shards: ShardReduce = single_shard) -> float:
    """Return the Euclidean norm of a float32 vector, summed in float64; the same bits on every machine.

    If `vector` is a shard's part of an update, `reduce_shards` must be that of the `Partial`.
    """
    return math.sqrt(reduce_shards(np.zeros(1), _squares(vector)).item())


def _squares(vector: Blocks) -> Iterator[Terms]:
    wide = np.empty(min(BLOCK, vector.size), np.float64)
    for block in vector:
        squares = wide[: block.size]
        squares[:] = block
        # Not np.dot: BLAS sums in an order that depends on the processor and the number of threads.
        yield np.square(squares, out=squares).sum(keepdims=True)


def scale_vector(vector: Blocks, factor: float) -> Blocks:
    """Return a vector times a factor (as float32), computed block by block when read; for 1, the vector itself."""
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
