"""Uniform sampling: each set of clients is equally likely. McMahan et al. 2017, arXiv 1602.05629, Algorithm 1."""

from __future__ import annotations

import numpy as np

from fedplat.sampling.candidates import BasePolicy, Candidates


class Uniform(BasePolicy, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="uniform"):
    """A policy in which each set of clients is equally likely."""

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """Draw `count` of the candidates, or all if there are not more than that."""
        return draw_uniformly(len(candidates), count, rng)


def draw_uniformly(total: int, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` of the numbers below `total`; if `count` is a small part, time grows with `count` only."""
    if count >= total:
        return list(range(total))
    return rng.choice(total, count, replace=False).tolist()
