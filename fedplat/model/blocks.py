"""A model's vector in blocks: what does not fit a processor's cache, or memory, is worked on piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]
"""One float32 vector: the floating-point entries of a model, in canonical order."""

BLOCK = 1 << 16
"""Elements worked on at a time: operands and scratch of this size stay in a core's cache."""


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


def blocks(size: int) -> Iterator[slice]:
    """Slices of `BLOCK` elements that cover `size` elements."""
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def is_finite(values: Blocks) -> bool:
    """Whether no entry is NaN or infinite."""
    return all(np.isfinite(block).all() for block in values)
