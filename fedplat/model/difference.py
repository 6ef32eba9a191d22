"""The update from one model to another: entry-wise, in any parts, so that it need not be in memory as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.model.schema import DTYPES, FLOATING, Schema
from fedplat.model.values import Bytes


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


class Difference:
    """The file of an update, computed from the flat buffers of both models while it is read.

    Its bytes are those of `Parameters.minus`. Neither buffer may change as long as it is read.
    """

    def __init__(self, schema: Schema, trained: Bytes, base: Bytes) -> None:
        self._schema = schema
        self._trained = trained
        self._base = base
        self.size_bytes = schema.file_size_bytes

    def read(self, start: int, scratch: Bytes) -> memoryview:
        """Return some bytes of the file from `start` on: at least one, and at most as many as `scratch` has.

        They are valid until `scratch`, whose size is a multiple of 8, changes.
        """
        header = self._schema.header
        if start < len(header):
            return memoryview(header)[start : start + scratch.size]
        start -= len(header)
        run = next(run for run in self._schema.segments if start < run.offset + run.size_bytes)
        dtype = DTYPES[run.dtype]
        skipped = (start - run.offset) % dtype.itemsize  # a part may begin within an entry
        first = start - skipped
        entries = slice(first, min(first + scratch.size, run.offset + run.size_bytes))
        trained = self._trained[entries]
        if run.dtype in FLOATING:
            out = scratch[: trained.size]
            subtract(run.dtype, trained.view(dtype), self._base[entries].view(dtype), out.view(dtype))
            trained = out
        return trained.data[skipped:]
