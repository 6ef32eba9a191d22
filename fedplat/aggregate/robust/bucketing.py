"""Bucketing: the means of small random groups of updates, instead of the updates.

Source: Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022 (arXiv
2006.09365), Algorithm 1: means of s updates differ less than the updates of clients with different data, and every
byzantine update still affects only one mean. The last group may be smaller; its mean is over the updates that it has.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import options as ranges
from fedplat.aggregate.robust.inputs import Mix, Rows


class Bucketing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="bucketing"):
    """Options of bucketing. Raises `ValueError` for a value out of range."""

    size: Annotated[int, Meta(ge=1, le=1000)] = 2
    """s, updates in a bucket; the paper has 2."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def rows_of(self, num_updates: int) -> int:
        """Return the number of rows that result from `num_updates`."""
        return -(-num_updates // self.size)

    def build(self, byzantine: int, seed: int) -> Mix:
        """Return the pre-aggregator; the seed and the order of the updates determine the buckets."""

        def mix(rows: Rows) -> Rows:
            order = np.random.default_rng(seed).permutation(len(rows))
            factors = np.zeros((self.rows_of(len(rows)), len(rows)))
            for number, bucket in enumerate(factors):
                members = order[number * self.size : (number + 1) * self.size]
                bucket[members] = 1 / len(members)
            return rows.combine(factors)

        return mix
