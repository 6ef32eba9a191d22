"""Poisson sampling: a trial for each client. McMahan et al. 2018, arXiv 1710.06963, Algorithm 1.

Privacy amplification by sampling rests on this: whether one client takes part depends on nothing but its own trial,
and neither does whose updates are in the model. For that a job needs, besides this policy,

- `selection.close = "deadline"`: an attempt that closes at a number of reports takes the fastest, and the chance to be
  among them is far above `rate`;
- a pool that does not depend on who is drawn: `wait_for` at the size of the fleet, or 0 (all who wait when
  `selection_s` is over);
- a low `min_fraction`: an attempt that draws fewer is abandoned and drawn again, so that the number drawn leaks through
  the minimum.

No more are drawn than the binomial's mean and five of its standard deviations, which bounds memory and what a round
costs. The chance that this bites is below 1e-6 a round for a mean of 150 or more, and 7e-6 for a mean of 10 (the
binomial is skewed); an accountant has to add it, over all rounds, to delta.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta, Struct

from fedplat.sampling.candidates import Candidates
from fedplat.sampling.uniform import some_of

CAP_DEVIATIONS = 5.0


class Poisson(Struct, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="poisson"):
    """Each client with probability `rate`, independently of all others."""

    rate: Annotated[float, Meta(gt=0.0, le=1.0)]

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
        """The most that are drawn of so many."""
        deviation = math.sqrt(total * self.rate * (1.0 - self.rate))
        return math.ceil(round(total * self.rate + CAP_DEVIATIONS * deviation, 9))
