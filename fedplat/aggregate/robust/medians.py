"""The coordinate-wise median and trimmed mean, and the geometric median.

Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv 1803.01498,
Definition 1 and Algorithm 1 (option I). For an even number of updates it is the mean of the two in the middle.

Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv 1803.01498,
Definition 2 and Algorithm 1 (option II): for each entry the f largest and the f smallest values are left out.

Source: Pillutla et al. 2022, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal Processing
(arXiv 1912.13445), Algorithm 2, the smoothed Weiszfeld algorithm: β_i = 1 / max(nu, ‖z - x_i‖), z ← Σ β_i x_i / Σ β_i.
z starts at 0, the base version. Here an iteration takes no pass over the updates, so iterations run to convergence.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, make_wrapper
from fedplat.model import Vector
from fedplat.model.blocks import Columns, allocate_rows


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


class TrimmedMean(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="trimmed-mean"):
    """The trimmed mean, which has no options; f is the number of byzantine updates."""

    def fewest(self, byzantine: int) -> int:
        """Return the smallest number of updates of which `byzantine` may be arbitrary."""
        return 2 * byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper, with pre-aggregation by `before`."""

        def combine(columns: Columns) -> Vector:
            kept = sort_columns(columns)[byzantine : len(columns) - byzantine]
            return kept.mean(axis=0, dtype=np.float64).astype(np.float32)

        def reduce(inputs: RobustInputs) -> Vector:
            return inputs.rows.each_column(combine)

        return make_wrapper(reduce, before)


_CONVERGED = 1e-10
"""A change of the shares that changes the result by less than the precision of float32."""


class GeometricMedian(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="geometric-median"
):
    """Options of the geometric median. Raises `ValueError` for a value out of range."""

    smoothing: ranges.Floor = 1e-6
    """nu, the distance below which all updates count as equally near, in the units of the model's entries."""
    iterations: Annotated[int, Meta(ge=1, le=100_000)] = 1000
    """Largest number of iterations; the paper has 3."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def fewest(self, byzantine: int) -> int:
        """Return the smallest number of updates of which `byzantine` may be arbitrary."""
        return 2 * byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper, with pre-aggregation by `before`."""

        def reduce(inputs: RobustInputs) -> Vector:
            rows, shares = inputs.rows, np.zeros(len(inputs.rows))
            for _ in range(self.iterations):
                nearness = 1 / np.maximum(rows.distances_to(shares), self.smoothing)
                last, shares = shares, nearness / nearness.sum()
                if np.abs(shares - last).max() <= _CONVERGED:
                    break
            return rows.weighted_sum(shares)

        return make_wrapper(reduce, before)
