"""Bulyan: Krum chooses again and again, and of what it chose the entries near the median are averaged.

Source: El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018, Section 4
(arXiv 1802.07927): θ = n - 2f updates are chosen, each by Krum among those that are left; of each entry the
β = θ - 2f values that are nearest to the median of the θ are averaged; n ≥ 4f + 3.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.cohort import Mix, RobustInputs, gathering
from fedplat.aggregate.robust.krum import rank_updates
from fedplat.aggregate.robust.median import ascending
from fedplat.model import Vector
from fedplat.model.rows import Columns, Matrix


class Bulyan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="bulyan"):
    """Options of Bulyan: none."""

    def fewest(self, byzantine: int) -> int:
        """The least number of updates of which so many may be byzantine."""
        return 4 * byzantine + 3

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """The rule, behind pre-aggregators."""

        def reduce(cohort: RobustInputs) -> Vector:
            number = len(cohort.rows)
            chosen = _select_updates(cohort.rows.squared_distances, byzantine, number - 2 * byzantine)
            near = number - 4 * byzantine
            return cohort.rows.select(chosen).each_column(lambda columns: _mean_near_median(columns, near))

        return gathering(reduce, before)


def _select_updates(squared_distances: Matrix, byzantine: int, count: int) -> list[int]:
    left = list(range(len(squared_distances)))
    chosen: list[int] = []
    while len(chosen) < count:
        best = rank_updates(squared_distances[np.ix_(left, left)], byzantine)[0]
        chosen.append(left.pop(best))
    return sorted(chosen)


def _mean_near_median(columns: Columns, near: int) -> Vector:
    """The mean of the `near` entries of each column that are nearest to its median: neighbours in ascending order."""
    ordered = ascending(columns).astype(np.float64)  # distances are exact: which are nearest is no matter of rounding
    number = len(ordered)
    median = ordered[[(number - 1) // 2, number // 2]].mean(axis=0)
    # As long as the next entry above is nearer than the first one below, it takes that one's place.
    is_nearer = ordered[near:] - median < median - ordered[: number - near]
    nearest = is_nearer.sum(axis=0) + np.arange(near)[:, None]
    return np.take_along_axis(ordered, nearest, axis=0).mean(axis=0).astype(np.float32)
