"""A model's vector in blocks: what does not fit a processor's cache, or memory, is worked on piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""One float32 vector: the floating-point entries of a model, in canonical order."""

BLOCK = 1 << 16
"""Elements worked on at a time: operands and scratch of this size stay in a core's cache."""


WINDOW = 4 * BLOCK
"""Elements that cheap passes take at once where they can: a plain fold of 25 M entries takes 0.7 of the time that it
takes by `BLOCK`, a pass over a file 0.75, since operands stream from memory the longer the better."""


class Blocks(Protocol):
    """A float32 vector that is read from its beginning, as often as wanted, and need not be in memory as a whole.

    Each block has `BLOCK` elements, but the last one. It may be changed by nobody, and is valid until the next one
    is drawn.
    """

    @property
    def size(self) -> int:
        """Number of elements."""
        ...

    def __iter__(self) -> Iterator[Vector]:
        """The blocks, in order."""
        ...


@runtime_checkable
class Windowed(Blocks, Protocol):
    """Blocks that can be had several at a time."""

    def windows(self) -> Iterator[Vector]:
        """The elements in order, `WINDOW` at a time; what is said of blocks holds for each."""
        ...


class VectorBlocks:
    """A vector in memory as `Blocks`: slices of it, which copy nothing.

    Raises `ValueError` if it is no float32 vector.

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
        """The blocks, in order."""
        return (self._vector[block] for block in blocks(self._vector.size))

    def windows(self) -> Iterator[Vector]:
        """The elements, `WINDOW` at a time."""
        return (self._vector[window] for window in blocks(self._vector.size, WINDOW))


def blocks(size: int, length: int = BLOCK) -> Iterator[slice]:
    """Slices of `length` elements that cover `size` elements."""
    return (slice(start, min(start + length, size)) for start in range(0, size, length))


def windows(values: Blocks) -> Iterator[Vector]:
    """The elements in parts of any size up to `WINDOW`: for whoever does not care where a part ends."""
    # Not `isinstance`: for a protocol that takes as long as to add 60,000 entries, and small updates are many.
    own: Callable[[], Iterator[Vector]] | None = getattr(values, "windows", None)
    return iter(values) if own is None else own()


def part_of(values: Blocks, columns: range | None) -> Blocks:
    """All columns of a vector that is read from its beginning, or some, which begin at a multiple of `BLOCK`."""
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
    """Whether no entry is NaN or infinite."""
    return all(np.isfinite(part).all() for part in windows(values))
