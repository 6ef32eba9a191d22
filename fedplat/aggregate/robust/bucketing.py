"""Bucketing: the means of small random groups of updates, instead of the updates.

Source: Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022 (arXiv
2006.09365), Algorithm 1: means of s updates each differ less than the updates of clients with different data; every
byzantine update still spoils one mean only. A last group that is smaller is the mean of those that it has.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import options as ranges
from fedplat.aggregate.robust.cohort import Mix, Rows


class Bucketing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="bucketing"):
    """Options of bucketing. A value out of its range is a `ValueError`."""

    size: Annotated[int, Meta(ge=1, le=1000)] = 2
    """s, updates in a bucket; the paper has 2."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def rows_of(self, num_updates: int) -> int:
        """How many rows become of so many."""
        return -(-num_updates // self.size)

    def build(self, byzantine: int, seed: int) -> Mix:
        """The mixing; who is in a bucket with whom follows from the seed and the order of the updates."""

        def mix(rows: Rows) -> Rows:
            order = np.random.default_rng(seed).permutation(len(rows))
            factors = np.zeros((self.rows_of(len(rows)), len(rows)))
            for number, bucket in enumerate(factors):
                members = order[number * self.size : (number + 1) * self.size]
                bucket[members] = 1 / len(members)
            return rows.combine(factors)

        return mix
