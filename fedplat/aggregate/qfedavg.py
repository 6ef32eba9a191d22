"""q-FedAvg: clients with a high loss have a larger weight, so that the model's accuracy is more even over clients.

Source: Li et al. 2020, "Fair Resource Allocation in Federated Learning", arXiv 1905.10497, Algorithm 2: with L = 1 /
(the clients' learning rate), F_k the loss of the base version on client k's data and Δw_k = -L · update_k, the model
moves by -Σ F_k^q Δw_k / Σ (q F_k^(q-1) ‖Δw_k‖² + L F_k^q). Here both sums use the job's weighting, in place of the
paper's sampling of clients by their number of examples, and both sides are divided by L. As in the authors' code,
10⁻¹⁰ is added to the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import MEAN_WEIGHT, BaseRule, Contribution, Partial, Rule, State, Wrapper
from fedplat.aggregate.claims import MAX_FACTOR, bound_claims
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Blocks, Vector
from fedplat.model.blocks import l2_norm, scale_vector

LOSS_BEFORE = "loss_before"


class QFedAvg(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="qfedavg"):
    """Options of q-FedAvg. Raises `ValueError` for a value out of range."""

    q: ranges.Exponent = 1.0
    """q, the importance of fairness; 0 is the mean of the updates. The paper's experiments have 0.001 to 5."""
    local_learning_rate: ranges.Rate = 0.1
    """1 / L: the learning rate of the clients, usually `config.learning_rate`."""
    max_loss: ranges.Rate = 1000.0
    """Largest loss that is accepted from a report, since a client with a large loss outweighs the others."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return weight_by_loss(self)(weighted_mean())


def weight_by_loss(options: QFedAvg) -> Wrapper:
    """Weight each update by its client's loss to the power of q, and shorten the step as in the paper.

    An update is read once for its norm, and once more to be folded. Losses are clamped to 0 to `max_loss`. Of
    three reports or more, none has more than ten times the weight of the median loss, or it would outweigh all others;
    and none is below a tenth of the median, or the model would stay where it is if q is below 1.
    """
    q, lipschitz = options.q, 1.0 / options.local_learning_rate

    def read(metrics: Mapping[str, float]) -> float:
        return min(max(metrics[LOSS_BEFORE], 0.0), options.max_loss)

    def wrap(inner: Rule) -> Rule:
        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            loss = contribution.metrics[LOSS_BEFORE] + 1e-10
            factor = loss**q
            norm = l2_norm(update, partial.reduce_shards) if q else 0.0
            bound = factor + (q * loss ** (q - 1) * lipschitz * norm**2 if q else 0.0)
            folded = inner.fold(partial, scale_vector(update, factor), contribution)
            sums = {"weighted_bound": contribution.weight * bound, MEAN_WEIGHT: contribution.weight * factor}
            return folded.plus(**sums)

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            mean, state = inner.apply(state, partial)
            return mean * (partial.weight / partial.sums["weighted_bound"]), state

        rule = dataclasses.replace(inner, fold=fold, apply=apply, metrics=inner.metrics | {LOSS_BEFORE})
        return bound_claims(read, LOSS_BEFORE, MAX_FACTOR ** (1 / max(q, 1.0)))(rule)

    return wrap
