"""Uniform sampling: each set of clients is equally likely. McMahan et al. 2017, arXiv 1602.05629, Algorithm 1."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from msgspec import Struct

from fedplat.sampling.candidates import Candidates


class Uniform(Struct, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="uniform"):
    """Each set of clients is equally likely."""

    remembers: ClassVar[bool] = False
    is_trial: ClassVar[bool] = False

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """`count` of the candidates, or all of them if there are no more."""
        return some_of(len(candidates), count, rng)


def some_of(total: int, count: int, rng: np.random.Generator) -> list[int]:
    """`count` of the numbers below `total`, in time that grows with `count` where that is a small part."""
    if count >= total:
        return list(range(total))
    return rng.choice(total, count, replace=False).tolist()
