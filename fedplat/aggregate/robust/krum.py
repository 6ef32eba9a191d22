"""Krum and Multi-Krum: the update, or the mean of those, whose nearest neighbours are nearest.

Source: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017,
Section 4 (arXiv 1703.02757): the score of an update is the sum of the squared distances to its n - f - 2 nearest
others, and n ≥ 2f + 3.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.cohort import Mix, RobustInputs, gathering
from fedplat.model import Vector
from fedplat.model.rows import Matrix


class Krum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="krum"):
    """Options of Krum: none."""

    def fewest(self, byzantine: int) -> int:
        """The least number of updates of which so many may be byzantine."""
        return 2 * byzantine + 3

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """The rule, behind pre-aggregators."""
        return _mean_of_best(byzantine, before, keep=1)


class MultiKrum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="multi-krum"):
    """Options of Multi-Krum. A value out of its range is a `ValueError`."""

    keep: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """m, how many updates are averaged, at most n - f; 0: n - f."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def fewest(self, byzantine: int) -> int:
        """The least number of updates of which so many may be byzantine."""
        return max(2 * byzantine + 3, self.keep + byzantine)

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """The rule, behind pre-aggregators."""
        return _mean_of_best(byzantine, before, self.keep)


def _mean_of_best(byzantine: int, before: Mix, keep: int) -> Wrapper:
    def reduce(cohort: RobustInputs) -> Vector:
        number = len(cohort.rows)
        count = keep or number - byzantine
        best = rank_updates(cohort.rows.squared_distances, byzantine)[:count]
        coefficients = np.zeros(number)
        coefficients[best] = 1 / count
        return cohort.rows.weighted_sum(coefficients)

    return gathering(reduce, before)


def rank_updates(squared_distances: Matrix, byzantine: int) -> list[int]:
    """The updates by their scores, the best first.

    A score looks at n - f - 2 neighbours, and at one if that is less. Two updates that are each other's only neighbour
    have equal ones: then the next neighbours count.
    """
    number = len(squared_distances)
    nearest = np.sort(squared_distances + np.diag(np.full(number, np.inf)), axis=1)[:, :-1]
    scores = nearest[:, : max(number - byzantine - 2, 1)].sum(axis=1)
    return np.lexsort((*nearest.T[::-1], scores)).tolist()
