"""Poisson sampling: a trial for each client. McMahan et al. 2018, arXiv 1710.06963, Algorithm 1.

Privacy amplification by sampling rests on this: whether one client takes part depends on nothing but its own trial,
and neither does whose updates are in the model. For that a job needs, besides this policy,

- `selection.close = "deadline"`: an attempt that closes at a number of reports takes the fastest, and the chance to be
  among them is far above `rate`;
- a pool that does not depend on who is drawn: `wait_for` at the size of the fleet, or 0 (all who wait when
  `selection_s` is over);
- no minimum: an attempt that draws fewer is abandoned and drawn again, so that the number drawn leaks through the
  minimum. Private jobs have none.

No more are drawn than a cap, which bounds memory and what a round costs. The chance that it bites is `OVERFLOW` a round
at most, whatever the binomial's mean, by Chernoff's bound; for large means the cap is 8.3 standard deviations above it.
With five it would bite with a chance of 3e-7, or 7e-6 where the mean is 10 (the binomial is skewed): more,
over a thousand rounds, than the delta of most jobs.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta, Struct

from fedplat.sampling.candidates import Candidates
from fedplat.sampling.uniform import some_of

OVERFLOW = 1e-15
"""The chance, in a round, that more would have been drawn than the cap lets."""


class Poisson(Struct, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="poisson"):
    """Each client with probability `rate`, independently of all others."""

    rate: Annotated[float, Meta(gt=0.0, le=1.0)]
    """Probability with which each client is drawn."""

    remembers: ClassVar[bool] = False
    is_trial: ClassVar[bool] = True

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """Those whose trial succeeds, whatever `count` is; at most `cap` of them.

        A binomial number of clients of which each set is equally likely: the same distribution as trials one by one.
        """
        total = len(candidates)
        drawn = int(rng.binomial(total, self.rate))
        return some_of(total, min(drawn, self.cap(total)), rng)

    def cap(self, total: int) -> int:
        """The most that are drawn of so many: the least c with P[more than c] below `OVERFLOW` by Chernoff's bound.

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
    """Kullback-Leibler divergence of two trials, in nats."""
    rest = (1.0 - share) * math.log((1.0 - share) / (1.0 - rate)) if share < 1.0 else 0.0
    return share * math.log(share / rate) + rest
