"""The coordinate-wise trimmed mean.

Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", arXiv 1803.01498,
Definition 2 and Algorithm 1 (option II): for each entry the f largest and the f smallest values are left out.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.aggregate.algebra import Wrapper
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, make_wrapper
from fedplat.aggregate.robust.median import sort_columns
from fedplat.model import Vector
from fedplat.model.rows import Columns


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
