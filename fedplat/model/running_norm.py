"""The norm of an update, computed from the bytes of its file while they arrive.

The bytes are in the processor's cache then; afterwards, the norm would need a second pass over the file.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.model.blocks import BLOCK
from fedplat.model.schema import DTYPES, FLOATING, Schema


class RunningNorm:
    """The L2 norm of the floating-point entries of a file of this schema, with the bits of `l2_norm`.

    Both sum the squares of the same blocks in the same order, wherever the bytes were cut. Not thread-safe.
    """

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        first = len(schema.header)
        self._runs = [
            (first + run.offset, first + run.offset + run.size_bytes, DTYPES[run.dtype])
            for run in schema.segments
            if run.dtype in FLOATING
        ]
        self.restart()

    @property
    def memory_bytes(self) -> int:
        """The memory that the norm needs from the first byte to the last, or until `pause`."""
        return 8 * min(BLOCK, self._schema.num_floating)

    @property
    def position(self) -> int:
        """The offset in the file of the next bytes to add."""
        return self._position

    def restart(self) -> None:
        """Forget all bytes."""
        self._position = 0
        self._has_header = True  # as far as it has arrived
        self._total = 0.0
        self._summed_to = 0  # the end of the last entry in `_total`
        self._squares: npt.NDArray[np.float64] | None = None  # of the block that is not complete yet
        self._filled = 0
        self._rest = b""  # the beginning of an entry

    def pause(self) -> None:
        """Free the memory; `position` goes back to the first entry that is not in a complete block."""
        if self._position < self._schema.file_size_bytes:
            self._position, self._filled, self._rest = self._summed_to, 0, b""
        self._squares = None

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the bytes from `position` on."""
        part, header = memoryview(data).cast("B"), self._schema.header
        begin = self._position
        end = self._position = begin + len(part)
        if begin < len(header):
            self._has_header &= bytes(part[: len(header) - begin]) == header[begin:end]
        for start, stop, dtype in self._runs:
            if start < end and begin < stop:
                self._add(part[max(start - begin, 0) : max(stop - begin, 0)], dtype, max(start, begin))
        if end >= self._schema.file_size_bytes:
            self._sum(end)
            self._squares = None

    def find(self, schema: Schema) -> float | None:
        """Return the norm, which is not finite if an entry is not; None unless the bytes are a file of this schema."""
        if not self._has_header or self._position != self._schema.file_size_bytes:
            return None
        return math.sqrt(self._total) if schema.header == self._schema.header else None

    def _add(self, part: memoryview, dtype: np.dtype[Any], start: int) -> None:
        """Add bytes of a run, which begin at an offset in the file."""
        if self._rest or len(part) % dtype.itemsize:
            start -= len(self._rest)
            part = memoryview(self._rest + part)
            whole = len(part) - len(part) % dtype.itemsize
            part, self._rest = part[:whole], bytes(part[whole:])
        if self._squares is None:
            self._squares = np.empty(min(BLOCK, self._schema.num_floating), np.float64)
        values = np.frombuffer(part, np.uint8).view(dtype)
        done = 0
        while done < values.size:
            count = min(values.size - done, BLOCK - self._filled)
            squares = self._squares[self._filled : self._filled + count]
            with np.errstate(over="ignore", invalid="ignore"):
                # A float64 entry beyond the range of float32 becomes infinite, as in `FloatingBlocks`.
                squares[:] = values[done : done + count].astype(np.float32, copy=False)
                np.square(squares, out=squares)
            done, self._filled = done + count, self._filled + count
            if self._filled == BLOCK:
                self._sum(start + done * dtype.itemsize)

    def _sum(self, end: int) -> None:
        """Add the squares so far to the total, as `l2_norm` adds those of a block; the last one ends at an offset."""
        if self._squares is not None and self._filled:
            self._total += self._squares[: self._filled].sum().item()
            self._filled = 0
        self._summed_to = end
