"""FLoRA: the sum of the clients' products goes into the weights, and each round begins with the same factors.

Source: Wang et al. 2024, "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations",
arXiv 2409.05976, Section 3: the stacked factors [p₁B₁ p₂B₂ ...] and [A₁; A₂; ...] have the product Σ p Bₖ Aₖ, which is
added to W₀, and clients begin the next round with new adapters.

Here the server adds up the products instead of sending the stack: with the changes ΔAₖ and ΔBₖ of the factors A, B of
the round's start, Σ p Bₖ Aₖ - B A = Σ p ΔB ΔA + (Σ p ΔB) A + B (Σ p ΔA). The sum is added to the server's own tensor
(`fedplat.aggregate.factors`) instead of W₀, and A and B stay those of the job's initial model, with B = 0. The paper
draws a new A in each round.

Clients may have adapters of a smaller rank than the job's model, with the same s = α / r. Such a client trains the
first rows of A and columns of B. It reports no change of the others, so B is 0 there and its product is exact.
"""

from __future__ import annotations

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import BaseRule, Partial, Rule
from fedplat.aggregate.factors import FactorPair, add_product, aggregate_products, base_of, mean_of
from fedplat.model import Vector

FLORA = "flora"


class Flora(BaseRule, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="rule", tag=FLORA):
    """Options of FLoRA. Raises `ValueError` for a value out of range."""

    scaling: ranges.Rate
    """s = lora_alpha / r of the adapters, the same for all clients and layers, also for those with another r."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return aggregate_products(_add_cross_terms, restarts=True, scaling=self.scaling, name=FLORA)


def _add_cross_terms(partial: Partial, pair: FactorPair, entries: range, step: Vector) -> None:
    add_product(step, mean_of(partial, pair.b), base_of(partial, pair.a), entries.start)
    add_product(step, base_of(partial, pair.b), mean_of(partial, pair.a), entries.start)
