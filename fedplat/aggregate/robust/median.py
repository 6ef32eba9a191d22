"""The coordinate-wise median.

Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv 1803.01498,
Definition 1 and Algorithm 1 (option I). Of an even number of updates it is the mean of the two in the middle.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.cohort import Mix, RobustInputs, gathering
from fedplat.model import Vector
from fedplat.model.rows import Columns, allocate_rows


class Median(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="median"):
    """Options of the coordinate-wise median: none."""

    def fewest(self, byzantine: int) -> int:
        """The least number of updates of which so many may be byzantine."""
        return 2 * byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """The rule, behind pre-aggregators."""
        return gathering(_median, before)


def _median(cohort: RobustInputs) -> Vector:
    return cohort.rows.each_column(middle)


def middle(columns: Columns) -> Vector:
    """The median of each column."""
    ordered, number, half = ascending(columns), len(columns), np.float32(0.5)
    # Halves first: the sum of two large entries may be infinite.
    return np.add(ordered[(number - 1) // 2] * half, ordered[number // 2] * half)


def ascending(columns: Columns) -> Columns:
    """The entries of each column in ascending order."""
    ordered = allocate_rows(len(columns), columns.shape[1], np.float32)
    ordered[...] = columns
    ordered.sort(axis=0)
    return ordered
