"""The geometric median, by Weiszfeld's algorithm (RFA).

Source: Pillutla et al. 2022, "Robust Aggregation for Federated Learning", IEEE Transactions on Signal Processing
(arXiv 1912.13445), Algorithm 2, the smoothed Weiszfeld algorithm: β_i = 1 / max(nu, ‖z - x_i‖), z ← Σ β_i x_i / Σ β_i.
z starts at 0, the base version. Here an iteration takes no pass over the updates, so iterations run to convergence.
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
        ranges.check(self)

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
