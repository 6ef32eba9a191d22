"""The values of a model or an update: in memory, in a file, or decoded while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat.model.blocks import BLOCK, WINDOW, Blocks, Vector, VectorBlocks, blocks, part_of
from fedplat.model.schema import DTYPES, FLOATING, Schema, Segment

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A flat buffer, or a part of it."""

Read: TypeAlias = Callable[[int, int], Bytes]
"""A reader of a flat buffer: returns `size` bytes from `start`, as memory that is valid until the next call."""


class Values(Protocol):
    """The values of a model or an update, which can be read repeatedly and need not be in memory as a whole.

    `Parameters` and `ModelFile` implement it, as does anything that returns the floating-point entries as float32
    blocks and the other entries unchanged.
    """

    @property
    def schema(self) -> Schema:
        """The schema of the values."""
        ...

    def to_blocks(self, columns: range | None = None) -> Blocks:
        """Return the floating-point entries as float32, in canonical order: all, or only those of `columns`.

        `columns` begin at a multiple of `WINDOW`.
        """
        ...

    def read_carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        """Iterate over the entries of one carried run, `BLOCK` at a time; each is valid until the next is drawn."""
        ...


class VectorValues(Values):
    """The `Values` of a vector in memory, with the carried entries of `base`."""

    def __init__(self, base: Values, vector: Vector) -> None:
        self._base, self._vector = base, vector

    @property
    @override
    def schema(self) -> Schema:
        return self._base.schema

    @override
    def to_blocks(self, columns: range | None = None) -> Blocks:
        return part_of(VectorBlocks(self._vector), columns)

    @override
    def read_carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        return self._base.read_carried(run)


class FloatingBlocks:
    """The floating-point entries of a flat buffer as float32 `Blocks`; float32 entries are not copied.

    A float64 entry beyond the range of float32 becomes infinite, without a warning.
    """

    def __init__(
        self, schema: Schema, reader: Callable[[], AbstractContextManager[Read]], columns: range | None = None
    ) -> None:
        """Select `columns`, or all. `reader()` is called for each pass, so that no two passes share a window."""
        self._schema = schema
        self._reader = reader
        self._columns = range(schema.num_floating) if columns is None else columns

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self._columns)

    def __iter__(self) -> Iterator[Vector]:
        return self._parts(BLOCK)

    def windows(self) -> Iterator[Vector]:
        """Iterate over the elements, `WINDOW` at a time."""
        return self._parts(WINDOW)

    def _parts(self, length: int) -> Iterator[Vector]:
        pieces, scratch = _pieces(self._schema, self._columns, length), np.empty(0, np.float32)
        with self._reader() as read:
            for part in blocks(self.size, length):
                count = part.stop - part.start
                run, first, end = next(pieces)
                values = read_run(read, run, first, end)
                if end == count and run.dtype == "F32":
                    yield values
                    continue
                if not scratch.size:
                    scratch = np.empty(min(length, self.size), np.float32)
                _convert(values, scratch[:end])
                while end < count:
                    run, first, more = next(pieces)
                    _convert(read_run(read, run, first, more), scratch[end : end + more])
                    end += more
                yield scratch[:count]


def read_run(read: Read, run: Segment, first: int, count: int) -> npt.NDArray[Any]:
    """Return `count` entries of a run, beginning with index `first`."""
    dtype = DTYPES[run.dtype]
    return read(run.offset + first * dtype.itemsize, count * dtype.itemsize).view(dtype)


def add_step(values: npt.NDArray[Any], step: Vector) -> npt.NDArray[Any]:
    """Return floating-point entries with a step added, in their own dtype; computed in float32 or a wider dtype.

    A result beyond the range of its dtype becomes infinite, without a warning.
    """
    with np.errstate(over="ignore"):
        if values.dtype.itemsize >= 4:
            return np.add(values, step)
        return (values.astype(np.float32) + step).astype(values.dtype)


def all_finite(values: npt.NDArray[Any]) -> bool:
    """Return whether no floating-point entry is NaN or infinite, in its own dtype or as float32."""
    if values.dtype == np.float64:  # 1e300 is finite, but becomes infinite when it is averaged
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
    return bool(np.isfinite(values).all())


def floating_runs(schema: Schema, columns: range) -> Iterator[tuple[Segment, range]]:
    """Yield the floating-point runs that contain some of the columns, and the range of entries in each."""
    position = 0
    for run in schema.segments:
        if run.dtype in FLOATING:
            entries = range(max(columns.start - position, 0), min(columns.stop - position, run.count))
            if entries:
                yield run, entries
            position += run.count


def _pieces(schema: Schema, columns: range, length: int) -> Iterator[tuple[Segment, int, int]]:
    """Yield the runs of columns, cut at run and part boundaries: the run, its first index, the number of entries."""
    position = 0
    for run, entries in floating_runs(schema, columns):
        first = entries.start
        while first < entries.stop:
            count = min(entries.stop - first, length - position % length)
            yield run, first, count
            first, position = first + count, position + count


def _convert(values: npt.NDArray[Any], out: Vector) -> None:
    if values.dtype == np.float64:
        with np.errstate(over="ignore"):
            out[...] = values
    else:
        out[...] = values
