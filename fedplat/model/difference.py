"""The update from one model to another: entry by entry, in any parts, so that it need not be in memory as a whole."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedplat.model.schema import DTYPES, FLOATING, Schema
from fedplat.model.values import Bytes

_ALIGNMENT = 8
"""The largest item size. A part of a flat buffer in canonical order that begins at a multiple has whole entries."""


def subtract(dtype: str, trained: npt.NDArray[Any], base: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Write a part of the update into `out`, of entries of one dtype; those that are not floating-point are copied.

    Differences of small floating-point numbers are computed in float32 and rounded once. There is no warning of those
    that are not finite: the server refuses them.
    """
    if dtype not in FLOATING:
        out[...] = trained
        return
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in ("F64", "F32"):
            np.subtract(trained, base, out=out)
        else:
            out[...] = trained.astype(np.float32) - base.astype(np.float32)


class Part(NamedTuple):
    """Trained values of one dtype: contiguous in memory, and from `offset` on in the flat buffer of their model."""

    dtype: str
    offset: int
    content: Bytes


class Difference:
    """The file of an update, computed from trained values and the flat buffer of the base while it is read.

    Its bytes are those of `Parameters.minus`. Neither may change as long as it is read.
    """

    def __init__(self, schema: Schema, trained: Sequence[Part], base: Bytes) -> None:
        self._schema = schema
        self._trained = [part for part in trained if part.content.size]
        self._starts = [part.offset for part in self._trained]
        self._base = base
        self.size_bytes = schema.file_size_bytes

    def read(self, start: int, scratch: Bytes) -> memoryview:
        """Return some bytes of the file from `start` on: at least one, and at most as many as `scratch` has.

        They are valid until `scratch`, whose size is a multiple of 8, changes.
        """
        header = self._schema.header
        if start < len(header):
            return memoryview(header)[start : start + scratch.size]
        skipped = (start - len(header)) % _ALIGNMENT
        first = start - len(header) - skipped
        out = scratch[: self._schema.size_bytes - first]
        self._compute(first, out)
        return out.data[skipped:]

    def _compute(self, first: int, out: Bytes) -> None:
        """Compute the bytes of the update's flat buffer from `first` on."""
        stop = first + out.size
        for part in self._trained[bisect.bisect_right(self._starts, first) - 1 :]:
            if part.offset >= stop:
                return
            begin, end = max(part.offset, first), min(part.offset + part.content.size, stop)
            dtype = DTYPES[part.dtype]
            trained = part.content[begin - part.offset : end - part.offset]
            subtract(
                part.dtype,
                trained.view(dtype),
                self._base[begin:end].view(dtype),
                out[begin - first : end - first].view(dtype),
            )
