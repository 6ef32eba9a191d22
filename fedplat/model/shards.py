"""Sharding of the columns of a model's vector over workers: each worker has the same shard of every vector.

A shard computes entry-wise results without the others. For a sum over all entries (a norm, inner products) each shard
has some of the terms, and `ShardReduce` adds up the terms of all shards. Terms are sums over blocks or windows, added
in the order of the columns, and shards begin at window boundaries, so the bits do not depend on the number of shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedplat.model.blocks import WINDOW

Terms = npt.NDArray[np.float64]


class ShardReduce(Protocol):
    """A sum over the terms of all shards."""

    def __call__(self, zero: Terms, terms: Iterable[Terms]) -> Terms:
        """Return `zero` plus the terms of the first shard, in order, plus those of the next, and so on; [...] each.

        All shards must call it, in the same order and with equal zeros. All receive the same result.
        """
        ...


def single_shard(zero: Terms, terms: Iterable[Terms]) -> Terms:
    """Return the sum of the terms when one shard has all columns."""
    total = zero.copy()
    for term in terms:
        total += term
    return total


def shards(size: int, number: int) -> list[range]:
    """Divide the columns of a vector of `size` entries into `number` shards, as evenly as whole windows allow.

    The last shards may be empty.

    >>> shards(3 * WINDOW + 5, 2)
    [range(0, 524288), range(524288, 786437)]
    """
    whole, more = divmod(-(-size // WINDOW), number)
    ends = [min((whole * (index + 1) + min(index + 1, more)) * WINDOW, size) for index in range(number)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
