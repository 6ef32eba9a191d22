"""A model's vector in blocks: vectors that do not fit a processor's cache, or memory, are processed in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
