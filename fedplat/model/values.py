"""Where the values of a model or an update come from, be they in memory, in a file, or decoded as they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedplat.model.blocks import BLOCK, Blocks, Vector, blocks
from fedplat.model.schema import DTYPES, FLOATING, Schema, Segment

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A flat buffer, or a part of it."""

Read: TypeAlias = Callable[[int, int], Bytes]
"""Reads from a flat buffer: `size` bytes from `start`, as memory that is valid until the next call."""


class Values(Protocol):
    """The values of a model or an update, which may be read as often as wanted and need not be in memory as a whole.

    `Parameters` are one; so is whatever else can give the floating-point entries as float32 blocks and the others
    as they are.
    """

    @property
    def schema(self) -> Schema:
        """What the values are."""
        ...

    def to_blocks(self) -> Blocks:
        """The floating-point entries as float32, [num_floating], in canonical order."""
        ...

    def carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        """The entries of one run of another dtype, `BLOCK` at a time; each part is valid until the next is drawn."""
        ...


class FloatingBlocks:
    """The floating-point entries of a flat buffer as float32 `Blocks`; a float32 block is handed on as it was read.

    A float64 entry beyond the range of float32 becomes infinite, without a warning.
    """

    def __init__(self, schema: Schema, read: Callable[[], Read]) -> None:
        """`read()` is called for each pass: readers of the same values do not share what they read into."""
        self._schema = schema
        self._read = read

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._schema.num_floating

    def __iter__(self) -> Iterator[Vector]:
        """The blocks, in order."""
        read, scratch = self._read(), np.empty(0, np.float32)
        pieces = _pieces(self._schema)
        for block in blocks(self.size):
            count = block.stop - block.start
            run, first, part = next(pieces)
            if part == count and run.dtype == "F32":
                yield read_run(read, run, first, part)
                continue
            if not scratch.size:
                scratch = np.empty(min(BLOCK, self.size), np.float32)
            end = part
            _convert(read_run(read, run, first, part), scratch[:part])
            while end < count:
                run, first, part = next(pieces)
                _convert(read_run(read, run, first, part), scratch[end : end + part])
                end += part
            yield scratch[:count]


def read_run(read: Read, run: Segment, first: int, count: int) -> npt.NDArray[Any]:
    """`count` entries of a run from the one with index `first`."""
    dtype = DTYPES[run.dtype]
    return read(run.offset + first * dtype.itemsize, count * dtype.itemsize).view(dtype)


def _pieces(schema: Schema) -> Iterator[tuple[Segment, int, int]]:
    """The floating-point runs, cut where a run or a block of the vector ends: run, index of the first, number."""
    position = 0
    for run in schema.segments:
        if run.dtype not in FLOATING:
            continue
        first = 0
        while first < run.count:
            part = min(run.count - first, BLOCK - position % BLOCK)
            yield run, first, part
            first, position = first + part, position + part


def _convert(values: npt.NDArray[Any], out: Vector) -> None:
    if values.dtype == DTYPES["BF16"]:  # the upper half of a float32; ml_dtypes converts the entries one by one
        bits = out.view(np.uint32)
        bits[...] = values.view(np.uint16)
        np.left_shift(bits, 16, out=bits)
    elif values.dtype == np.float64:
        with np.errstate(over="ignore"):
            out[...] = values
    else:
        out[...] = values
