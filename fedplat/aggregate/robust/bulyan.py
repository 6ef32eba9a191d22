"""Bulyan: Krum selects updates one by one, and for each entry the values near the median are averaged.

Source: El Mhamdi et al. 2018, "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018, Section 4
(arXiv 1802.07927): θ = n - 2f updates are selected, each by Krum among the remaining ones; for each entry the
β = θ - 2f values nearest to the median of the θ are averaged; n ≥ 4f + 3.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, make_wrapper
from fedplat.aggregate.robust.krum import rank_updates
from fedplat.aggregate.robust.median import sort_columns
from fedplat.model import Vector
from fedplat.model.rows import Columns, Matrix


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
