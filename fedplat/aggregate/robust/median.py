"""The coordinate-wise median.

Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv 1803.01498,
Definition 1 and Algorithm 1 (option I). For an even number of updates it is the mean of the two in the middle.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, make_wrapper
from fedplat.model import Vector
from fedplat.model.rows import Columns, allocate_rows


class Median(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="median"):
    """The coordinate-wise median, which has no options."""

    def fewest(self, byzantine: int) -> int:
        """Return the smallest number of updates of which `byzantine` may be arbitrary."""
        return 2 * byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper, with pre-aggregation by `before`."""
        return make_wrapper(_reduce, before)


def _reduce(inputs: RobustInputs) -> Vector:
    return inputs.rows.each_column(median_of_columns)


def median_of_columns(columns: Columns) -> Vector:
    """Return the median of each column."""
    ordered, number, half = sort_columns(columns), len(columns), np.float32(0.5)
    # Halve first: the sum of two large entries may be infinite.
    return np.add(ordered[(number - 1) // 2] * half, ordered[number // 2] * half)


def sort_columns(columns: Columns) -> Columns:
    """Return the entries of each column in ascending order."""
    ordered = allocate_rows(len(columns), columns.shape[1], np.float32)
    ordered[...] = columns
    ordered.sort(axis=0)
    return ordered
