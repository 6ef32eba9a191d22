"""Krum, Multi-Krum and Bulyan: updates are selected by the distances to their nearest neighbours.

Source: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017,
Section 4 (arXiv 1703.02757): the score of an update is the sum of the squared distances to its n - f - 2 nearest
neighbours, and n ≥ 2f + 3.

Source: El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018, Section 4
(arXiv 1802.07927): θ = n - 2f updates are selected, each by Krum among the remaining ones; for each entry the
β = θ - 2f values nearest to the median of the θ are averaged; n ≥ 4f + 3.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, make_wrapper
from fedplat.aggregate.robust.medians import sort_columns
from fedplat.model import Vector
from fedplat.model.blocks import Columns, Matrix


class Krum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="krum"):
    """The rule Krum, which has no options."""

    def fewest(self, byzantine: int) -> int:
        """Return the smallest number of updates of which `byzantine` may be arbitrary."""
        return 2 * byzantine + 3

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper, with pre-aggregation by `before`."""
        return _mean_of_best(byzantine, before, keep=1)


class MultiKrum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="multi-krum"):
    """Options of Multi-Krum. Raises `ValueError` for a value out of range."""

    keep: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """m, the number of updates that are averaged, at most n - f; 0: n - f."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def fewest(self, byzantine: int) -> int:
        """Return the smallest number of updates of which `byzantine` may be arbitrary."""
        return max(2 * byzantine + 3, self.keep + byzantine)

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper, with pre-aggregation by `before`."""
        return _mean_of_best(byzantine, before, self.keep)


def _mean_of_best(byzantine: int, before: Mix, keep: int) -> Wrapper:
    def reduce(inputs: RobustInputs) -> Vector:
        number = len(inputs.rows)
        count = keep or number - byzantine
        best = rank_updates(inputs.rows.squared_distances, byzantine)[:count]
        coefficients = np.zeros(number)
        coefficients[best] = 1 / count
        return inputs.rows.weighted_sum(coefficients)

    return make_wrapper(reduce, before)


def rank_updates(squared_distances: Matrix, byzantine: int) -> list[int]:
    """Sort the indices of the updates by score, the best first.

    A score uses n - f - 2 neighbours, but at least one. If two updates are each other's only neighbour, their scores
    are equal, and the next neighbours decide.
    """
    number = len(squared_distances)
    nearest = np.sort(squared_distances + np.diag(np.full(number, np.inf)), axis=1)[:, :-1]
    scores = nearest[:, : max(number - byzantine - 2, 1)].sum(axis=1)
    return np.lexsort((*nearest.T[::-1], scores)).tolist()


class Bulyan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="bulyan"):
    """The rule Bulyan, which has no options."""

    def fewest(self, byzantine: int) -> int:
        """Return the smallest number of updates of which `byzantine` may be arbitrary."""
        return 4 * byzantine + 3

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper, with pre-aggregation by `before`."""

        def reduce(inputs: RobustInputs) -> Vector:
            number = len(inputs.rows)
            chosen = _select_updates(inputs.rows.squared_distances, byzantine, number - 2 * byzantine)
            near = number - 4 * byzantine
            return inputs.rows.select(chosen).each_column(lambda columns: _mean_near_median(columns, near))

        return make_wrapper(reduce, before)


def _select_updates(squared_distances: Matrix, byzantine: int, count: int) -> list[int]:
    remaining = list(range(len(squared_distances)))
    chosen: list[int] = []
    while len(chosen) < count:
        best = rank_updates(squared_distances[np.ix_(remaining, remaining)], byzantine)[0]
        chosen.append(remaining.pop(best))
    return sorted(chosen)


def _mean_near_median(columns: Columns, near: int) -> Vector:
    """Return the mean of the `near` entries of each column nearest to its median, which are adjacent when sorted."""
    ordered = sort_columns(columns).astype(np.float64)  # distances are exact, so rounding does not decide the nearest
    number = len(ordered)
    median = ordered[[(number - 1) // 2, number // 2]].mean(axis=0)
    # The window moves up while the next entry above it is nearer than its first entry.
    is_nearer = ordered[near:] - median < median - ordered[: number - near]
    nearest = is_nearer.sum(axis=0) + np.arange(near)[:, None]
    return np.take_along_axis(ordered, nearest, axis=0).mean(axis=0).astype(np.float32)
