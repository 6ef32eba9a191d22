"""Addition of a step to a model, window by window: the only place where a version becomes the next one.

The server commits this result, and clients that rebuild a version from a delta must compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fedplat.model.blocks import WINDOW, Vector, blocks
from fedplat.model.schema import FLOATING, Schema, Segment
from fedplat.model.values import Read, add_step, floating_runs, read_run


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
    spreads = [each.columns for each in base.schema.statistics if each.is_spread]
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
                _limit(values, column - run.count + first, spreads)
                yield PlacedEntries(start + first * values.itemsize, values)
                first, used = first + count, used + count


def _limit(values: npt.NDArray[Any], column: int, spreads: Sequence[range]) -> None:
    """Raise negative entries of some columns to 0, in place; the first of the values has the index `column`."""
    for columns in spreads:
        part = values[max(columns.start - column, 0) : max(columns.stop - column, 0)]
        np.maximum(part, part.dtype.type(0), out=part)
