"""FedNova and q-FedAvg, which weight updates by what clients report, and the limits on these numbers.

Source: Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
arXiv 2007.07481, Section 4, the update rule (FedNova) with τ_eff = Σ p_i ‖a_i‖₁: updates become normalized
gradients, d_i = Δ_i / ‖a_i‖₁, and the model moves by τ_eff Σ p_i d_i. With equal steps this is FedAvg.

‖a_i‖₁ is the total weight of the gradients of a client's steps: the number of steps with plain SGD, more with momentum,
less with a proximal term. A client reports the number of steps as `local_steps` and, if ‖a_i‖₁ differs from it, also
`effective_steps` (`fedplat.aggregate.local.effective_steps` computes it).

Source: Li et al. 2020, "Fair Resource Allocation in Federated Learning", arXiv 1905.10497, Algorithm 2: with L = 1 /
(the clients' learning rate), F_k the loss of the base version on client k's data and Δw_k = -L · update_k, the model
moves by -Σ F_k^q Δw_k / Σ (q F_k^(q-1) ‖Δw_k‖² + L F_k^q). Here both sums use the job's weighting, in place of the
paper's sampling of clients by their number of examples, and both sides are divided by L. As in the authors' code,
10⁻¹⁰ is added to the loss.

A server cannot verify them. One that is far from all others would decide the step of a round, whether it is far too
large or far too small: FedNova divides by a client's own number. So each is compared with the median of its attempt,
which is known only at the end. Until then the updates stay readable, and if a claim exceeds its limits, they are summed
once more; otherwise the sum has the bits that it has without limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import MEAN_WEIGHT, BaseRule, Contribution, Partial, Rule, State, Wrapper
from fedplat.aggregate.mean import weighted_mean
from fedplat.aggregate.server_optimizers import FedAvg, server_sgd
from fedplat.model import Blocks, Vector
from fedplat.model.blocks import l2_norm, scale_vector

LOCAL_STEPS = "local_steps"
EFFECTIVE_STEPS = "effective_steps"


class FedNova(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fednova"):
    """Options of FedNova. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 1.0
    """η, the factor of the step; 1 is the paper's algorithm."""
    max_local_steps: ranges.Rate = 100_000.0
    """Largest number of local steps that is accepted from a report, since it scales the step of the whole round."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

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
        ranges.check_ranges(self)

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


MAX_FACTOR = 10.0
"""How many times the median a claim counts for at most, and the median a claim at least."""
MIN_CLAIMS = 3
"""With fewer claims, none is far from the others: of two, either could be the wrong one."""

Read = Callable[[Mapping[str, float]], float]
"""A function that returns a claim from the metrics of a report."""


def limit_claims(claims: Sequence[float], most: float = MAX_FACTOR) -> list[float]:
    """Return claims that are at most `most` times the lower median, and at least a tenth of it (`MAX_FACTOR`).

    >>> limit_claims([100.0, 100.0, 90.0, 1.0, 1e9])
    [100.0, 100.0, 90.0, 10.0, 1000.0]
    """
    if len(claims) < MIN_CLAIMS:
        return list(claims)
    median = median_low(claims)
    return [min(max(claim, median / MAX_FACTOR), median * most) for claim in claims]


def bound_claims(read: Read, name: str, most: float = MAX_FACTOR) -> Wrapper:
    """Wrap a rule that folds a claim, so that it finds the bounded claim in the metric of this name."""

    def with_claim(contribution: Contribution, claim: float) -> Contribution:
        return dataclasses.replace(contribution, metrics={**contribution.metrics, name: claim})

    def wrap(inner: Rule) -> Rule:
        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            folded = inner.fold(partial, update, with_claim(contribution, read(contribution.metrics)))
            return dataclasses.replace(folded, kept=(*partial.kept, (update, contribution)))

        def merge(left: Partial, right: Partial) -> Partial:
            return dataclasses.replace(inner.merge(left, right), kept=left.kept + right.kept)

        def reduce(partial: Partial) -> Partial:
            claims = [read(contribution.metrics) for _, contribution in partial.kept]
            if (bounded := limit_claims(claims, most)) == claims:
                return dataclasses.replace(partial, kept=())
            again = dataclasses.replace(partial, total=inner.start(partial.total.size).total, weight=0.0, num_updates=0)
            again = dataclasses.replace(again, sums={}, kept=())
            for (update, contribution), claim in zip(partial.kept, bounded, strict=True):
                again = inner.fold(again, update, with_claim(contribution, claim))
            return again

        def gather(remembered: Mapping[str, Blocks], partial: Partial) -> Partial:
            return reduce(partial)

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            return inner.apply(state, reduce(partial))

        return dataclasses.replace(inner, fold=fold, merge=merge, apply=apply, gather=gather)

    return wrap
