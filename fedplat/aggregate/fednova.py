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
from collections.abc import Mapping

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import MEAN_WEIGHT, BaseRule, Contribution, Partial, Rule, State, Wrapper
from fedplat.aggregate.claims import bound_claims
from fedplat.aggregate.fedavg import FedAvg, server_sgd
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Blocks, Vector
from fedplat.model.blocks import scale_vector

LOCAL_STEPS = "local_steps"
EFFECTIVE_STEPS = "effective_steps"


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

    Reported steps are clamped to 1 to `max_steps`, and then to a tenth to ten times the median of three reports or
    more: a number far too small would multiply its client's update, and one far too large those of all others.
    """

    def read(metrics: Mapping[str, float]) -> float:
        reported = metrics.get(EFFECTIVE_STEPS, metrics[LOCAL_STEPS])
        return min(max(reported, 1.0), max_steps)

    def wrap(inner: Rule) -> Rule:
        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            steps = contribution.metrics[EFFECTIVE_STEPS]
            folded = inner.fold(partial, scale_vector(update, 1.0 / steps), contribution)
            terms = {"weighted_steps": contribution.weight * steps, MEAN_WEIGHT: contribution.weight / steps}
            return folded.plus(**terms)

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            mean, state = inner.apply(state, partial)
            return mean * (partial.sums["weighted_steps"] / partial.weight), state

        rule = dataclasses.replace(inner, fold=fold, apply=apply, metrics=inner.metrics | {LOCAL_STEPS})
        return bound_claims(read, EFFECTIVE_STEPS)(rule)

    return wrap
