"""Oort: prefer clients that are fast enough and have data with a large loss. Lai et al. 2021, arXiv 2010.06081.

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
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta
from typing_extensions import override

from fedplat.sampling import uniform, weighted
from fedplat.sampling.candidates import BasePolicy, Candidates, ClientHistory

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
            return unexplored[uniform.draw_uniformly(len(unexplored), count, rng)].tolist()
        speeds = weighted.to_weights(candidates.values_of(self.speed))[unexplored]
        return unexplored[weighted.draw_by_weight(weighted.fill_missing_weights(speeds), count, rng)].tolist()

    def _exploit(
        self, histories: Sequence[ClientHistory], candidates: Candidates, count: int, rng: np.random.Generator
    ) -> _Indices:
        if count <= 0:
            return np.empty(0, np.int64)
        preferred_s = self.preferred_s(candidates.utilities, candidates.round)
        scores = self.scores(histories, candidates.round, preferred_s)
        cut_off = CUT_OFF * np.partition(scores, -count)[-count]
        admitted = np.flatnonzero(scores >= cut_off)
        return admitted[weighted.draw_by_weight(scores[admitted], count, rng)]

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
