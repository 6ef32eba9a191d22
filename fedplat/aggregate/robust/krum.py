"""Krum and Multi-Krum: the update, or the mean of several, with the smallest distances to its nearest neighbours.

Source: Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017,
Section 4 (arXiv 1703.02757): the score of an update is the sum of the squared distances to its n - f - 2 nearest
neighbours, and n ≥ 2f + 3.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, make_wrapper
from fedplat.model import Vector
from fedplat.model.rows import Matrix


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
        ranges.check(self)

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
