"""FedNova: a mean of updates that result from unequal numbers of local steps.

Source: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
arXiv 2007.07481, Section 4, the update rule (FedNova) with τ_eff = Σ p_i ‖a_i‖₁: updates become normalized
gradients, d_i = Δ_i / ‖a_i‖₁, and the model moves by τ_eff Σ p_i d_i. With equal steps this is FedAvg.

‖a_i‖₁ is the total weight of the gradients of a client's steps: the number of steps with plain SGD, more with momentum,
less with a proximal term. A client reports the number of steps as `local_steps` and, if ‖a_i‖₁ differs from it, also
`effective_steps` (`fedplat.aggregate.local.effective_steps` computes it).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import MEAN_WEIGHT, BaseRule, Contribution, Partial, Rule, State, Wrapper
from fedplat.aggregate.fedavg import FedAvg, server_sgd
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Blocks, Vector
from fedplat.model.blocks import scale_vector

LOCAL_STEPS = "local_steps"
EFFECTIVE_STEPS = "effective_steps"
MAX_FACTOR = 10.0
"""How many times the median a number of steps counts for in the mean number: up to twice as much, by rounding."""
MIN_REPORTS = 3
"""With fewer reports, none is far above the others: of two, either could be the wrong one."""
NUM_POWERS = 24
"""The powers of two by which reports are counted; larger numbers count as the last one."""


class FedNova(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fednova"):
    """Options of FedNova. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 1.0
    """η, the factor of the step; 1 is the paper's algorithm."""
    max_local_steps: ranges.Rate = 100_000.0
    """Largest number of local steps that is accepted from a report, since it scales the step of the whole round."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_sgd(FedAvg(self.learning_rate))(normalize_by_steps(self.max_local_steps)(weighted_mean()))


def normalize_by_steps(max_steps: float) -> Wrapper:
    """Divide each update by its client's steps, and multiply the mean by the mean number of steps.

    Reported steps are clamped to 1 to `max_steps`. In the mean number none counts for more than about `MAX_FACTOR`
    times the median of three reports or more, since it scales the updates of all others.
    """

    def wrap(inner: Rule) -> Rule:
        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            reported = contribution.metrics.get(EFFECTIVE_STEPS, contribution.metrics[LOCAL_STEPS])
            steps = min(max(reported, 1.0), max_steps)
            folded = inner.fold(partial, scale_vector(update, 1.0 / steps), contribution)
            sums = {**_count(steps, contribution.weight), MEAN_WEIGHT: contribution.weight / steps}
            return folded.plus(**sums)

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            mean, state = inner.apply(state, partial)
            return mean * (_sum_steps(partial.sums) / partial.weight), state

        return dataclasses.replace(inner, fold=fold, apply=apply, metrics=inner.metrics | {LOCAL_STEPS})

    return wrap


def _count(steps: float, weight: float) -> dict[str, float]:
    """Return the terms of one report: its weighted steps, and the same for the reports of each power of two.

    From these the median follows within a factor of two, whatever the order and the number of the reports.
    """
    terms = {"weighted_steps": weight * steps}
    own = min(int(math.log2(steps)), NUM_POWERS - 1)
    for power in range(NUM_POWERS):
        is_own = power == own
        terms[f"count_{power}"] = float(is_own)
        terms[f"weight_{power}"], terms[f"steps_{power}"] = is_own * weight, is_own * weight * steps
    return terms


def _sum_steps(sums: Mapping[str, float]) -> float:
    """Return the sum of the weighted steps, without what is far above the median."""
    counts = [sums[f"count_{power}"] for power in range(NUM_POWERS)]
    num_reports = math.fsum(counts)
    total = sums["weighted_steps"]
    if num_reports < MIN_REPORTS:
        return total
    median = next(power for power in range(NUM_POWERS) if 2 * math.fsum(counts[: power + 1]) >= num_reports)
    most = MAX_FACTOR * 2.0 ** (median + 1)
    excess = (sums[f"steps_{power}"] - most * sums[f"weight_{power}"] for power in range(median + 1, NUM_POWERS))
    return total - math.fsum(max(each, 0.0) for each in excess)
