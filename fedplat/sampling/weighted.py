"""Weighted sampling without replacement. Efraimidis and Spirakis 2006, "Weighted random sampling with a reservoir".

Each client gets the key u^(1/w), with u uniform, and the largest keys are drawn (Algorithm A). This is equivalent to
drawing one client after the other, each with probability proportional to its weight among the remaining ones. The first
is therefore drawn with probability w / W. The probability of being among *all* drawn clients is less than proportional
for large weights, necessarily, since it is at most 1. The keys are compared as log w + Gumbel noise, which has the same
order and neither underflows nor overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta
from typing_extensions import override

from fedplat.sampling.candidates import BasePolicy, Candidates

Weights = npt.NDArray[np.float64]

LARGEST_WEIGHT = 1e30
"""Upper bound of a weight: clients report their weights, and sums over all clients must stay finite."""


class Weighted(BasePolicy, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="weighted"):
    """A policy that draws clients with a larger weight more often.

    A client without a weight, or with one that is not positive, counts as the mean of the others.
    """

    label: Annotated[str, Meta(max_length=1000)] = ""
    """Label with the weight, a number; empty: the number of examples in the last report."""
    max_weight: Annotated[float, Meta(gt=0.0, le=LARGEST_WEIGHT)] = LARGEST_WEIGHT
    """Largest weight of a client, since clients report labels and examples themselves."""

    @property
    @override
    def remembers(self) -> bool:
        """True without a label: it uses the clients' numbers of examples."""
        return not self.label

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """Draw `count` of the candidates, or all if there are not more than that."""
        if count >= len(candidates):
            return list(range(len(candidates)))
        weights = to_weights(candidates.values_of(self.label)) if self.label else _example_weights(candidates)
        return draw_by_weight(fill_missing_weights(np.minimum(weights, self.max_weight)), count, rng)


def _example_weights(candidates: Candidates) -> Weights:
    weights = np.zeros(len(candidates))
    for index, history in candidates.list_known():
        weights[index] = history.num_examples or 0.0
    return weights


def to_weights(values: Sequence[str | None]) -> Weights:
    """Convert labels to weights of at most `LARGEST_WEIGHT`; 0 if a label is missing, not a number, or negative."""
    return np.array([_as_weight(value) for value in values], np.float64)


def _as_weight(value: str | None) -> float:
    try:
        weight = float(value) if value is not None else 0.0
    except ValueError:
        return 0.0
    return min(weight, LARGEST_WEIGHT) if weight >= 0.0 else 0.0  # also 0 for NaN


def fill_missing_weights(weights: Weights) -> Weights:
    """Replace weights that are not positive by the mean of the positive ones; by 1 if no weight is positive."""
    positive = weights > 0.0
    return np.where(positive, weights, weights[positive].mean() if positive.any() else 1.0)


def draw_by_weight(weights: Weights, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` different indices, one after the other in proportion to the remaining weights.

    Weights are finite and not negative; indices with weight 0 are drawn, uniformly, after all others.
    """
    if count >= len(weights):
        return list(range(len(weights)))
    if count <= 0:
        return []
    keys = rng.gumbel(size=len(weights))
    positive = weights > 0.0
    keys[positive] += np.log(weights[positive])
    keys[~positive] -= 1e6  # below every other key: logarithms of positive doubles are at least -745
    return np.argpartition(keys, -count)[-count:].tolist()
