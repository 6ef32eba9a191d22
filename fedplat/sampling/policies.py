"""The sampling policies: uniform, Poisson, weighted, stratified, and Oort.

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

Each client gets the key u^(1/w), with u uniform, and the largest keys are drawn (Algorithm A). This is equivalent to
drawing one client after the other, each with probability proportional to its weight among the remaining ones. The first
is therefore drawn with probability w / W. The probability of being among *all* drawn clients is less than proportional
for large weights, necessarily, since it is at most 1. The keys are compared as log w + Gumbel noise, which has the same
order and neither underflows nor overflows.

Proportional allocation (Neyman 1934). Fractional shares are not rounded by largest remainder: a small stratum, with a
remainder that is always among the smallest, would never be drawn. They are rounded by systematic sampling (Madow 1949)
instead: the number drawn from each stratum is its share rounded up or down, and equals its share in expectation. So
with proportional shares every client is drawn with the same probability.

The paper's Algorithm 1, with sections 4.2 to 4.4, for a cohort of K in round R:

- A share of K, which starts at 0.9 and is multiplied by 0.98 each round down to 0.2, *explores*: it is drawn from
  clients that never participated, by speed if a label has it. The rest *exploits* the history of the other clients.
- The statistical utility of a client is U = |B| sqrt(mean loss²) (Section 4.2), clipped at the 95 % quantile, so that
  outliers and clients that exaggerate gain little (Section 4.4), plus the temporal uncertainty sqrt(0.1 ln R / L),
  where L is the round of the client's last participation (Algorithm 1).
- It is multiplied by (T / t)^alpha if the client's duration t is above the preferred duration T (Equation 1).
- Clients with at least 95 % of the utility of the last one that would be selected are admitted, and are drawn in
  proportion to their utility.
- The pacer (Section 4.3) raises T by `pacer_s` whenever the total utility of W rounds is below that of the W before.

Details that the paper does not specify are as in its authors' code: utilities are divided by the largest before the
uncertainty is added, which otherwise would depend on the unit of the loss, and the pacer runs every W rounds. A client
that participated and never reported counts as explored, with utility 0. The blacklist and the fairness knob are omitted
(`selection.min_separation` prevents repeated selection of the same clients).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Meta
from typing_extensions import override

from fedplat.sampling.candidates import BasePolicy, Candidates, ClientHistory


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


Weights = npt.NDArray[np.float64]

LARGEST_WEIGHT = 1e30
"""Upper bound of a weight: clients report their weights, and sums over all clients must stay finite."""


class Weighted(BasePolicy, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="weighted"):
    """A policy that draws clients with a larger weight more often.

    A client without a weight, or with one that is not positive, counts as the mean of the others.
    """

    label: Annotated[str, Meta(max_length=1000)] = ""
    """Label with the weight, a number; empty: the number of examples in the last report."""
    max_weight: Annotated[float, Meta(gt=0.0, le=LARGEST_WEIGHT)] = LARGEST_WEIGHT
    """Largest weight of a client, since clients report labels and examples themselves."""

    @property
    @override
    def remembers(self) -> bool:
        """True without a label: it uses the clients' numbers of examples."""
        return not self.label

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """Draw `count` of the candidates, or all if there are not more than that."""
        if count >= len(candidates):
            return list(range(len(candidates)))
        weights = to_weights(candidates.values_of(self.label)) if self.label else _example_weights(candidates)
        return draw_by_weight(fill_missing_weights(np.minimum(weights, self.max_weight)), count, rng)


def _example_weights(candidates: Candidates) -> Weights:
    weights = np.zeros(len(candidates))
    for index, history in candidates.list_known():
        weights[index] = history.num_examples or 0.0
    return weights


def to_weights(values: Sequence[str | None]) -> Weights:
    """Convert labels to weights of at most `LARGEST_WEIGHT`; 0 if a label is missing, not a number, or negative."""
    return np.array([_as_weight(value) for value in values], np.float64)


def _as_weight(value: str | None) -> float:
    try:
        weight = float(value) if value is not None else 0.0
    except ValueError:
        return 0.0
    return min(weight, LARGEST_WEIGHT) if weight >= 0.0 else 0.0  # also 0 for NaN


def fill_missing_weights(weights: Weights) -> Weights:
    """Replace weights that are not positive by the mean of the positive ones; by 1 if no weight is positive."""
    positive = weights > 0.0
    return np.where(positive, weights, weights[positive].mean() if positive.any() else 1.0)


def draw_by_weight(weights: Weights, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` different indices, one after the other in proportion to the remaining weights.

    Weights are finite and not negative; indices with weight 0 are drawn, uniformly, after all others.
    """
    if count >= len(weights):
        return list(range(len(weights)))
    if count <= 0:
        return []
    keys = rng.gumbel(size=len(weights))
    positive = weights > 0.0
    keys[positive] += np.log(weights[positive])
    keys[~positive] -= 1e6  # below every other key: logarithms of positive doubles are at least -745
    return np.argpartition(keys, -count)[-count:].tolist()


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


CLIPPED_QUANTILE = 0.95
CUT_OFF = 0.95
UNCERTAINTY = 0.1

_Indices = npt.NDArray[np.int64]
_Numbers = npt.NDArray[np.float64]
_Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Oort(BasePolicy, frozen=True, forbid_unknown_fields=True, tag_field="policy", tag="oort"):
    """A policy that prefers clients with a high loss that are not too slow, and eventually tries all clients.

    Clients must report the metric `loss` or, better, `loss_squared`, the mean of the squared losses.
    """

    pacer_s: Annotated[float, Meta(ge=0.01, le=31_536_000.0)]
    """Initial preferred duration of an assignment, and the step by which the pacer raises it, in seconds (Δ)."""
    window: Annotated[int, Meta(ge=1, le=1_000_000)] = 20
    """Number of rounds that the pacer compares (W)."""
    alpha: Annotated[float, Meta(ge=0.0, le=100.0)] = 2.0
    """Exponent of the penalty for slow clients."""
    exploration: _Share = 0.9
    """Share of the cohort, in round 1, for clients that never participated."""
    exploration_decay: _Share = 0.98
    """Factor by which that share changes from round to round."""
    min_exploration: _Share = 0.2
    """Lowest value of that share."""
    speed: Annotated[str, Meta(max_length=1000)] = ""
    """Label with a number, in proportion to which new clients are drawn; empty: uniformly."""

    @property
    @override
    def remembers(self) -> bool:
        return True

    def __post_init__(self) -> None:
        if self.min_exploration > self.exploration:
            raise ValueError(
                f"min_exploration = {self.min_exploration}: expected at most exploration, which is {self.exploration}"
            )

    def draw(self, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        """Draw `count` of the candidates, or all if there are not more than that."""
        if count >= len(candidates):
            return list(range(len(candidates)))
        known = candidates.list_known()
        explored = np.array([index for index, _ in known], np.int64)
        is_new = np.ones(len(candidates), bool)
        is_new[explored] = False
        unexplored = np.flatnonzero(is_new)
        # The number of clients to explore is rounded at random, so that small cohorts explore too.
        share = max(self.exploration * self.exploration_decay ** (candidates.round - 1), self.min_exploration)
        num_new = math.floor(share * count + rng.random())
        num_new = max(min(num_new, len(unexplored)), count - len(explored))
        chosen = self._exploit([history for _, history in known], candidates, count - num_new, rng)
        return [*explored[chosen].tolist(), *self._explore(unexplored, candidates, num_new, rng)]

    def _explore(self, unexplored: _Indices, candidates: Candidates, count: int, rng: np.random.Generator) -> list[int]:
        if not self.speed:
            return unexplored[draw_uniformly(len(unexplored), count, rng)].tolist()
        speeds = to_weights(candidates.values_of(self.speed))[unexplored]
        return unexplored[draw_by_weight(fill_missing_weights(speeds), count, rng)].tolist()

    def _exploit(
        self, histories: Sequence[ClientHistory], candidates: Candidates, count: int, rng: np.random.Generator
    ) -> _Indices:
        if count <= 0:
            return np.empty(0, np.int64)
        preferred_s = self.preferred_s(candidates.utilities, candidates.round)
        scores = self.scores(histories, candidates.round, preferred_s)
        cut_off = CUT_OFF * np.partition(scores, -count)[-count]
        admitted = np.flatnonzero(scores >= cut_off)
        return admitted[draw_by_weight(scores[admitted], count, rng)]

    def scores(self, histories: Sequence[ClientHistory], round_: int, preferred_s: float) -> _Numbers:
        """Compute Util(i) of Algorithm 1, the expected utility of each client in this round."""
        utilities = np.array([history.utility for history in histories])
        utilities = np.minimum(utilities, np.quantile(utilities, CLIPPED_QUANTILE))
        if (largest := utilities.max()) > 0.0:
            utilities = utilities / largest
        last_rounds = np.array([history.round for history in histories], np.float64)
        scores = utilities + np.sqrt(UNCERTAINTY * math.log(round_) / last_rounds)
        durations = np.array([history.duration_s or 0.0 for history in histories])
        slow = durations > preferred_s
        scores[slow] *= (preferred_s / durations[slow]) ** self.alpha
        return scores

    def preferred_s(self, utilities: Sequence[float], round_: int) -> float:
        """Compute T, the preferred duration in seconds that the pacer sets from the utilities of earlier rounds."""
        window, raised = self.window, 0
        for end in range(2 * window + 1, round_ + 1, window):
            before, last = utilities[end - 2 * window : end - window], utilities[end - window : end]
            raised += math.fsum(before) > math.fsum(last)
        return self.pacer_s * (1 + raised)
