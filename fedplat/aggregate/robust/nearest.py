"""Nearest-neighbour mixing: each update becomes the mean of the n - f that are nearest to it.

Source: Allouah et al. 2023, "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", AISTATS 2023
(arXiv 2302.01772), Algorithm 2. An update is its own nearest; of equal distances the first counts.
"""

from __future__ import annotations

import msgspec
import numpy as np

from fedplat.aggregate.robust.cohort import Mix, Rows


class NearestNeighbours(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="nearest"):
    """Options of nearest-neighbour mixing: none."""

    def rows_of(self, num_updates: int) -> int:
        """How many rows become of so many."""
        return num_updates

    def build(self, byzantine: int, seed: int) -> Mix:
        """The mixing."""

        def mix(rows: Rows) -> Rows:
            count = len(rows) - byzantine
            nearest = np.argsort(rows.squared_distances, axis=1, kind="stable")[:, :count]
            factors = np.zeros((len(rows), len(rows)))
            np.put_along_axis(factors, nearest, 1 / count, axis=1)
            return rows.combine(factors)

        return mix
