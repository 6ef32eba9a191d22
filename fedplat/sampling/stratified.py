"""Stratified sampling by a label: the cohort has its share of each stratum in every round, not only on average.

Proportional allocation (Neyman 1934). Fractional shares are not rounded by largest remainder: a small stratum, with a
remainder that is always among the smallest, would never be drawn. They are rounded by systematic sampling (Madow 1949)
instead: the number drawn from each stratum is its share rounded up or down, and equals its share in expectation. So
with proportional shares every client is drawn with the same probability.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from fedplat.sampling.candidates import BasePolicy, Candidates
from fedplat.sampling.uniform import draw_uniformly

_Counts = npt.NDArray[np.int64]
_Shares = npt.NDArray[np.float64]


class Stratified(BasePolicy, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="stratified"):
    """A policy with one stratum for each value of a label, and one for clients without the label.

    Within a stratum each set of clients is equally likely.
    """

    label: Annotated[str, Meta(min_length=1, max_length=1000)]
    """Label with the strata as values."""
    shares: Literal["proportional", "equal"] = "proportional"
    """`"proportional"` to the number of waiting clients of each stratum, or `"equal"` as far as there are enough."""

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """Draw `count` of the candidates, or all if there are not more than that."""
        if count >= len(candidates):
            return list(range(len(candidates)))
        strata: dict[str | None, list[int]] = {}
        for index, value in enumerate(candidates.values_of(self.label)):
            strata.setdefault(value, []).append(index)
        members = list(strata.values())
        sizes = np.array([len(stratum) for stratum in members], np.int64)
        shares = sizes * (count / sizes.sum()) if self.shares == "proportional" else divide_equally(sizes, count)
        numbers = round_shares(shares, count, rng)
        return [
            stratum[i]
            for stratum, number in zip(members, numbers.tolist(), strict=True)
            for i in draw_uniformly(len(stratum), number, rng)
        ]


def divide_equally(sizes: _Counts, count: int) -> _Shares:
    """Divide `count` equally over the strata, at most its size to each: the remainder is divided over the others."""
    shares, remaining = np.zeros(len(sizes)), float(count)
    order = np.argsort(sizes, kind="stable")
    for position, stratum in enumerate(order):
        shares[stratum] = min(float(sizes[stratum]), remaining / (len(sizes) - position))
        remaining -= shares[stratum]
    return shares


def round_shares(shares: _Shares, count: int, rng: np.random.Generator) -> _Counts:
    """Round shares to integers with the sum `count`, each up or down, and equal to its share in expectation.

    Systematic sampling: the shares are intervals placed end to end in random order. Points at distance 1 with a random
    offset are placed over them, and each share is rounded to the number of points in its interval.
    """
    order = rng.permutation(len(shares))
    ends = np.cumsum(shares[order])
    ends[-1] = count  # without rounding errors
    points = np.floor(ends + rng.random()).astype(np.int64)
    numbers = np.empty(len(shares), np.int64)
    numbers[order] = np.diff(points, prepend=0)
    return numbers
