"""The columns of a model's vector, shared out over those that work on it together: each has one shard of every vector.

What is computed entry by entry, a shard has for itself. Of what is added up over all entries (a norm, inner products)
each shard has some of the terms, and `ShardReduce` adds up those of all. The terms are those of blocks or windows,
added in the order of the columns, and shards begin where windows do, so the bits do not depend on the number of shards.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from fedplat.model.blocks import WINDOW

Terms = npt.NDArray[np.float64]


class ShardReduce(Protocol):
    """Adds up what all shards have."""

    def __call__(self, zero: Terms, terms: Iterable[Terms]) -> Terms:
        """`zero` plus the terms of the first shard, in order, plus those of the next one, and so on; [...] each.

        All shards have to call it, in the same order and with equal zeros. The result is the same for all.
        """
        ...


def single_shard(zero: Terms, terms: Iterable[Terms]) -> Terms:
    """The sum of the terms where one shard has all columns."""
    total = zero.copy()
    for term in terms:
        total += term
    return total


def shards(size: int, number: int) -> list[range]:
    """The columns of a vector of `size` entries in so many shards, as alike as may be; the last ones may be empty.

    >>> shards(3 * WINDOW + 5, 2)
    [range(0, 524288), range(524288, 786437)]
    """
    whole, more = divmod(-(-size // WINDOW), number)
    ends = [min((whole * (index + 1) + min(index + 1, more)) * WINDOW, size) for index in range(number)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
