"""Poisson sampling: an independent trial for each client. McMahan et al. 2018, arXiv 1710.06963, Algorithm 1.

Privacy amplification by sampling requires that the participation of a client depends only on its own trial, and that
this also holds for the presence of its update in the model. For that a job needs, besides this policy,

- `selection.close = "deadline"`: an attempt that closes at a number of reports uses the fastest clients, and their
  probability of inclusion is far above `rate`;
- eligible clients that do not depend on the draw: `wait_for` equal to the size of the fleet, or 0 (all clients that
  wait when `selection_s` ends);
- no minimum: an attempt that draws fewer is abandoned and drawn again, so the number drawn leaks through the minimum.
  Private jobs have no minimum.

The number drawn is capped, which bounds the memory and the cost of a round. By Chernoff's bound, the cap takes effect
with a probability of at most `OVERFLOW` per round for any mean of the binomial; for large means it is 8.3 standard
deviations above the mean. A cap at five standard deviations would take effect with a probability of 3e-7, or 7e-6 for a
mean of 10 (the binomial is skewed): over a thousand rounds, more than the delta of most jobs.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from fedplat.sampling.candidates import BasePolicy, Candidates
from fedplat.sampling.uniform import draw_uniformly

OVERFLOW = 1e-15
"""Upper bound of the probability, per round, that the cap takes effect."""


class Poisson(BasePolicy, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="poisson"):
    """A policy that draws each client with probability `rate`, independently of all others."""

    rate: Annotated[float, Meta(gt=0.0, le=1.0)]
    """Probability with which each client is drawn."""

    is_trial: ClassVar[bool] = True

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """Draw the clients with a successful trial, for any `count`; at most `cap` of them.

        Draws a binomial number of clients, with all sets of that size equally likely: the same distribution as
        individual trials.
        """
        total = len(candidates)
        drawn = int(rng.binomial(total, self.rate))
        return draw_uniformly(total, min(drawn, self.cap(total)), rng)

    def cap(self, total: int) -> int:
        """Return the maximum number drawn from `total`: the least c with P[X > c] ≤ `OVERFLOW` by Chernoff's bound.

        P[X ≥ k] ≤ exp(-n KL(k/n ‖ rate)) for k above the mean (Hoeffding 1963, Theorem 1).
        """
        low, high = math.ceil(total * self.rate), total
        while low < high:
            middle = (low + high) // 2
            if total * _divergence((middle + 1) / total, self.rate) >= -math.log(OVERFLOW):
                high = middle
            else:
                low = middle + 1
        return high


def _divergence(share: float, rate: float) -> float:
    """Return the Kullback-Leibler divergence of two Bernoulli distributions, in nats."""
    rest = (1.0 - share) * math.log((1.0 - share) / (1.0 - rate)) if share < 1.0 else 0.0
    return share * math.log(share / rate) + rest
