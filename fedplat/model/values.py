"""The values of a model or an update: in memory, in a file, or decoded while they are read; the addition of a step.

The server commits this result, and clients that rebuild a version from a delta must compute the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from fedplat import texts
from fedplat.errors import ModelError
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


def read_array(name: str, value: Any) -> npt.NDArray[Any]:
    """Return the values of a tensor as an array on the CPU, which may share their memory.

    A tensor of PyTorch may require gradients, be on any device, and be of bfloat16. Raises `ModelError`, whatever the
    type of the value raises.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise ModelError(f"tensor {name!r} is a masked array; expected one without a mask, such as its filled()")
    torch = sys.modules.get("torch")  # else there are no tensors of it
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    try:
        return _read_tensor(torch, value) if is_tensor else np.asarray(value)
    except Exception as exc:  # any type may raise anything
        kind = value.dtype if is_tensor else type(value).__name__
        raise ModelError(f"tensor {name!r} ({kind}) has no dense values in NumPy: {texts.describe(exc)}") from exc


def _read_tensor(torch: Any, tensor: Any) -> npt.NDArray[Any]:
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


class FlatModel(Protocol):
    """A model with a readable flat buffer, such as `Parameters` and `ModelFile`."""

    @property
    def schema(self) -> Schema:
        """The model's schema."""
        ...

    def reader(self, longest: int) -> AbstractContextManager[Read]:
        """Return a reader of the flat buffer, for at most `longest` bytes at a time."""
        ...


def read_base_values(read: Read, run: Segment) -> Iterator[npt.NDArray[Any]]:
    """Iterate over the entries of a run of the base."""
    return (read_run(read, run, part.start, part.stop - part.start) for part in blocks(run.count, WINDOW))


class PlacedEntries(NamedTuple):
    """Entries of a flat buffer, and the byte offset at which they begin."""

    start: int
    values: npt.NDArray[Any]


def apply_step(
    base: FlatModel,
    steps: Iterator[Vector],
    carried: Callable[[Read, Segment], Iterator[npt.NDArray[Any]]],
    columns: range | None = None,
) -> Iterator[PlacedEntries]:
    """Yield the flat buffer of `base` with a step added, part by part, each valid until the next is drawn.

    `steps` are the entries of the step for `columns` (None: all), in order, in parts of any size up to `WINDOW`, drawn
    as needed. `carried` returns the entries of a carried run, as `read_base_values` does, or nothing if another shard
    owns them. A variance among the running statistics stays at least 0, whatever a codec has made of its step.
    """
    entries = dict(floating_runs(base.schema, range(base.schema.num_floating) if columns is None else columns))
    step, used = np.empty(0, np.float32), 0
    column = 0  # of the first entry of a run
    with base.reader(8 * WINDOW) as read:
        for run in base.schema.segments:
            start = run.offset
            if run.dtype not in FLOATING:
                for values in carried(read, run):
                    yield PlacedEntries(start, values)
                    start += values.nbytes
                continue
            first, stop = (entries[run].start, entries[run].stop) if run in entries else (0, 0)
            column += run.count
            while first < stop:
                if used == step.size:
                    step, used = next(steps), 0
                count = min(stop - first, step.size - used)
                values = add_step(read_run(read, run, first, count), step[used : used + count])
                limit_spreads(values, base.schema.spreads, column - run.count + first)
                yield PlacedEntries(start + first * values.itemsize, values)
                first, used = first + count, used + count


def limit_spreads(values: npt.NDArray[Any], spreads: Sequence[range], column: int = 0) -> None:
    """Raise negative entries of some columns to 0, in place; the first of the values has the index `column`."""
    for columns in spreads:
        part = values[max(columns.start - column, 0) : max(columns.stop - column, 0)]
        np.maximum(part, part.dtype.type(0), out=part)
