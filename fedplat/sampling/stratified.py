"""Stratified sampling by a label: the cohort has its share of each stratum in every round, not only on average.

Proportional allocation (Neyman 1934). The parts of a client that are left over in the shares are not given to the
largest remainders: a small stratum, whose remainder is always among the smallest, would never be drawn at all. They
are drawn by systematic sampling (Madow 1949) instead: each stratum has its share rounded up or down, and exactly its
share in expectation, so that with proportional shares every client is drawn with the same probability.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from fedplat.sampling.candidates import Candidates
from fedplat.sampling.uniform import some_of

_Counts = npt.NDArray[np.int64]
_Shares = npt.NDArray[np.float64]


class Stratified(Struct, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="stratified"):
    """Clients with the same value of a label are one stratum, those without the label another.

    Within a stratum each set of clients is equally likely.
    """

    label: Annotated[str, Meta(min_length=1, max_length=1000)]
    """Label whose values are the strata."""
    shares: Literal["proportional", "equal"] = "proportional"
    """`"proportional"` to the number of clients of each stratum that wait, or `"equal"`, as far as there are enough."""

    remembers: ClassVar[bool] = False
    is_trial: ClassVar[bool] = False

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """`count` of the candidates, or all of them if there are no more."""
        if count >= len(candidates):
            return list(range(len(candidates)))
        strata: dict[str | None, list[int]] = {}
        for index, value in enumerate(candidates.values_of(self.label)):
            strata.setdefault(value, []).append(index)
        members = list(strata.values())
        sizes = np.array([len(stratum) for stratum in members], np.int64)
        shares = sizes * (count / sizes.sum()) if self.shares == "proportional" else equal_shares(sizes, count)
        numbers = round_shares(shares, count, rng)
        return [
            stratum[i]
            for stratum, number in zip(members, numbers.tolist(), strict=True)
            for i in some_of(len(stratum), number, rng)
        ]


def equal_shares(sizes: _Counts, count: int) -> _Shares:
    """The same for each stratum, but no more than it has: what is left over goes to the others, in equal parts."""
    shares, left = np.zeros(len(sizes)), float(count)
    order = np.argsort(sizes, kind="stable")
    for position, stratum in enumerate(order):
        shares[stratum] = min(float(sizes[stratum]), left / (len(sizes) - position))
        left -= shares[stratum]
    return shares


def round_shares(shares: _Shares, count: int, rng: np.random.Generator) -> _Counts:
    """Whole numbers with the sum `count`, each its share rounded up or down, and its share in expectation.

    Systematic sampling: a comb with one tooth at each whole number is laid over the shares, put end to end in random
    order, at a random place; each share gets the teeth that fall on it.
    """
    order = rng.permutation(len(shares))
    ends = np.cumsum(shares[order])
    ends[-1] = count  # which it is but for rounding errors
    teeth = np.floor(ends + rng.random()).astype(np.int64)
    numbers = np.empty(len(shares), np.int64)
    numbers[order] = np.diff(teeth, prepend=0)
    return numbers
