"""Nearest-neighbour mixing: each update is replaced by the mean of the n - f updates nearest to it.

Source: Allouah et al. 2023, "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", AISTATS 2023
(arXiv 2302.01772), Algorithm 2. An update is its own nearest neighbour; at equal distances the first one counts.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.aggregate.robust.inputs import Mix, Rows


class NearestNeighbours(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="nearest"):
    """Nearest-neighbour mixing, which has no options."""

    def rows_of(self, num_updates: int) -> int:
        """Return the number of rows that result from `num_updates`."""
        return num_updates

    def build(self, byzantine: int, seed: int) -> Mix:
        """Return the pre-aggregator."""

        def mix(rows: Rows) -> Rows:
            count = len(rows) - byzantine
            nearest = np.argsort(rows.squared_distances, axis=1, kind="stable")[:, :count]
            factors = np.zeros((len(rows), len(rows)))
            np.put_along_axis(factors, nearest, 1 / count, axis=1)
            return rows.combine(factors)

        return mix
