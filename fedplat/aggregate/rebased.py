"""An update as the difference from another version than the one that its client started from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fedplat.model import BLOCK, Blocks, Schema, Segment, Values, Vector


def rebase(update: Values, origin: Values, base: Values) -> Values:
    """Return the difference from `base` to the model that a client trained from `origin`: update + (origin - base).

    A rule that is `from_latest` folds it if `base` was committed after the client started. It is computed in blocks,
    each time that it is read. All three have the same schema; entries that are not floating-point are the update's.
    """
    return _Rebased(update, origin, base)


class _Rebased:
    def __init__(self, update: Values, origin: Values, base: Values) -> None:
        self._update, self._origin, self._base = update, origin, base

    @property
    def schema(self) -> Schema:
        return self._update.schema

    def to_blocks(self, columns: range | None = None) -> Blocks:
        return _RebasedBlocks(*(values.to_blocks(columns) for values in (self._update, self._origin, self._base)))

    def read_carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        return self._update.read_carried(run)


class _RebasedBlocks:
    def __init__(self, update: Blocks, origin: Blocks, base: Blocks) -> None:
        self._parts = update, origin, base

    @property
    def size(self) -> int:
        return self._parts[0].size

    def __iter__(self) -> Iterator[Vector]:
        scratch = np.empty(min(BLOCK, self.size), np.float32)
        for update, origin, base in zip(*self._parts, strict=True):
            difference = np.subtract(origin, base, out=scratch[: update.size])
            yield np.add(difference, update, out=difference)
