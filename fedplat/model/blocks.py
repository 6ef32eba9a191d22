"""A model's vector in blocks, in shards over workers, and its norm: no vector needs to fit into memory.

A shard computes entry-wise results without the others. For a sum over all entries (a norm, inner products) each shard
has some of the terms, and `ShardReduce` adds up the terms of all shards. Terms are sums over blocks or windows, added
in the order of the columns, and shards begin at window boundaries, so the bits do not depend on the number of shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""One float32 vector: the floating-point entries of a model, in canonical order."""

BLOCK = 1 << 16
"""Elements processed at a time: operands and scratch of this size stay in a core's cache."""


WINDOW = 4 * BLOCK
"""Elements that cheap passes process at a time if possible. Longer parts stream better from memory: a plain fold of
25 M entries takes 0.7 of the time that it takes by `BLOCK`, a pass over a file 0.75."""


class Blocks(Protocol):
    """A float32 vector that can be read repeatedly, always from its beginning, and need not be in memory as a whole.

    Each block has `BLOCK` elements, except the last one. A block must not be modified, and is valid until the next
    one is drawn.
    """

    @property
    def size(self) -> int:
        """Number of elements."""
        ...

    def __iter__(self) -> Iterator[Vector]:
        """Iterate over the blocks, in order."""
        ...


@runtime_checkable
class Windowed(Blocks, Protocol):
    """Blocks that can also be read several at a time."""

    def windows(self) -> Iterator[Vector]:
        """Iterate over the elements, `WINDOW` at a time; the rules for blocks apply to each window."""
        ...


class VectorBlocks:
    """A vector in memory as `Blocks`: slices of it, which copy nothing.

    Raises `ValueError` unless it is a float32 vector.

    >>> [block.tolist() for block in VectorBlocks(np.array([1, 2], np.float32))]
    [[1.0, 2.0]]
    """

    def __init__(self, vector: Vector) -> None:
        if vector.dtype != np.float32 or vector.ndim != 1:
            raise ValueError(f"the vector is {vector.dtype} {list(vector.shape)}; expected float32 of one dimension")
        self._vector = vector

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._vector.size

    def __iter__(self) -> Iterator[Vector]:
        return (self._vector[block] for block in blocks(self._vector.size))

    def windows(self) -> Iterator[Vector]:
        """Iterate over the elements, `WINDOW` at a time."""
        return (self._vector[window] for window in blocks(self._vector.size, WINDOW))


def blocks(size: int, length: int = BLOCK) -> Iterator[slice]:
    """Yield slices of `length` elements that cover `size` elements."""
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


def windows(values: Blocks) -> Iterator[Vector]:
    """Iterate over the elements in parts of any size up to `WINDOW`, for callers that do not depend on boundaries."""
    # Not `isinstance`: on a protocol it takes as long as adding 60,000 entries, and there are many small updates.
    own: Callable[[], Iterator[Vector]] | None = getattr(values, "windows", None)
    return iter(values) if own is None else own()


def part_of(values: Blocks, columns: range | None) -> Blocks:
    """Return some columns of a vector, which begin at a multiple of `BLOCK`, or the vector itself if they are all."""
    return values if columns is None or len(columns) == values.size else _PartBlocks(values, columns)


class _PartBlocks:
    def __init__(self, values: Blocks, columns: range) -> None:
        self._values, self._columns = values, columns

    @property
    def size(self) -> int:
        return len(self._columns)

    def __iter__(self) -> Iterator[Vector]:
        position, columns = 0, self._columns
        for block in self._values:
            if position >= columns.stop:
                return
            if position >= columns.start:
                yield block[: columns.stop - position]
            position += block.size


def is_finite(values: Blocks) -> bool:
    """Return whether no entry is NaN or infinite."""
    return all(np.isfinite(part).all() for part in windows(values))


Terms = npt.NDArray[np.float64]


class ShardReduce(Protocol):
    """A sum over the terms of all shards."""

    def __call__(self, zero: Terms, terms: Iterable[Terms]) -> Terms:
        """Return `zero` plus the terms of the first shard, in order, plus those of the next, and so on; [...] each.

        All shards must call it, in the same order and with equal zeros. All receive the same result.
        """
        ...


def single_shard(zero: Terms, terms: Iterable[Terms]) -> Terms:
    """Return the sum of the terms when one shard has all columns."""
    total = zero.copy()
    for term in terms:
        total += term
    return total


def shards(size: int, number: int) -> list[range]:
    """Divide the columns of a vector of `size` entries into `number` shards, as evenly as whole windows allow.

    The last shards may be empty.

    >>> shards(3 * WINDOW + 5, 2)
    [range(0, 524288), range(524288, 786437)]
    """
    whole, more = divmod(-(-size // WINDOW), number)
    ends = [min((whole * (index + 1) + min(index + 1, more)) * WINDOW, size) for index in range(number)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


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
