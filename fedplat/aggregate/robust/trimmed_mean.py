"""The coordinate-wise trimmed mean.

Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv 1803.01498,
Definition 2 and Algorithm 1 (option II): of each entry the f largest and the f smallest values are left out.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.cohort import Mix, RobustInputs, gathering
from fedplat.aggregate.robust.median import ascending
from fedplat.model import Vector
from fedplat.model.rows import Columns


class TrimmedMean(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="trimmed-mean"):
    """Options of the trimmed mean: none; f is the number of byzantine updates."""

    def fewest(self, byzantine: int) -> int:
        """The least number of updates of which so many may be byzantine."""
        return 2 * byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """The rule, behind pre-aggregators."""

        def combine(columns: Columns) -> Vector:
            kept = ascending(columns)[byzantine : len(columns) - byzantine]
            return kept.mean(axis=0, dtype=np.float64).astype(np.float32)

        def reduce(cohort: RobustInputs) -> Vector:
            return cohort.rows.each_column(combine)

        return gathering(reduce, before)
