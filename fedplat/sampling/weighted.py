"""Weighted sampling without replacement. Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir".

Each client gets the key u^(1/w), with u uniform, and the largest keys are drawn (Algorithm A). It is exactly this
process: one client after the other, each with probability proportional to its weight among those that are left. The
first is therefore drawn with probability w / W; the chance to be among *all* that are drawn is less than proportional
for large weights, and can be nothing else, since it is at most 1. The keys are compared as log w + Gumbel noise
(their order is the same), which neither underflows nor overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat.sampling.candidates import Candidates

Weights = npt.NDArray[np.float64]

LARGEST_WEIGHT = 1e30
"""Clients say their weights, and sums over all of them shall be finite."""


class Weighted(Struct, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="weighted"):
    """Clients with a larger weight are drawn more often.

    A client without a weight, or with one that is not positive, counts as the mean of the others.
    """

    label: Annotated[str, Meta(max_length=1000)] = ""
    """Label that holds the weight, a number; empty: the number of examples last reported."""
    max_weight: Annotated[float, Meta(gt=0.0, le=LARGEST_WEIGHT)] = LARGEST_WEIGHT
    """Largest weight of a client, since clients report labels and examples themselves."""

    is_trial: ClassVar[bool] = False

    @property
    def remembers(self) -> bool:
        """Whether it asks what clients reported."""
        return not self.label

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """`count` of the candidates, or all of them if there are no more."""
        if count >= len(candidates):
            return list(range(len(candidates)))
        weights = as_weights(candidates.values_of(self.label)) if self.label else _of_examples(candidates)
        return by_weight(fill_missing_weights(np.minimum(weights, self.max_weight)), count, rng)


def _of_examples(candidates: Candidates) -> Weights:
    weights = np.zeros(len(candidates))
    for index, past in candidates.list_known():
        weights[index] = past.num_examples or 0.0
    return weights


def as_weights(values: Sequence[str | None]) -> Weights:
    """Labels as numbers, none above `LARGEST_WEIGHT`; 0 for what is no number or negative."""
    return np.array([_as_weight(value) for value in values], np.float64)


def _as_weight(value: str | None) -> float:
    try:
        weight = float(value) if value is not None else 0.0
    except ValueError:
        return 0.0
    return min(weight, LARGEST_WEIGHT) if weight >= 0.0 else 0.0  # not NaN either


def fill_missing_weights(weights: Weights) -> Weights:
    """The weights, with the mean of the positive ones for all others; all alike if there are none."""
    positive = weights > 0.0
    return np.where(positive, weights, weights[positive].mean() if positive.any() else 1.0)


def by_weight(weights: Weights, count: int, rng: np.random.Generator) -> list[int]:
    """`count` different indices, one after the other in proportion to the weights that are left.

    Weights are finite and not negative; those of 0 are drawn, uniformly, once no others are left.
    """
    if count >= len(weights):
        return list(range(len(weights)))
    if count <= 0:
        return []
    keys = rng.gumbel(size=len(weights))
    positive = weights > 0.0
    keys[positive] += np.log(weights[positive])
    keys[~positive] -= 1e6  # below every key with a weight: logarithms of doubles lie within 745
    return np.argpartition(keys, -count)[-count:].tolist()
