"""FedEx-LoRA: the mean of both factors of an adapter, and the exact difference from the mean of their products.

Source: Singhal et al. 2024, "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
Models", arXiv 2410.09432, Section 4: after a round clients have W₀ + R, mean(A) and mean(B), with the residual
R = mean(Bₖ Aₖ) - mean(B) mean(A).

With the clients' changes ΔAₖ and ΔBₖ since the round's start and weights p of sum 1, the same residual is

    R = Σ p ΔB ΔA - (Σ p ΔB) (Σ p ΔA)

since all terms with the factors of the start cancel. The rule computes this form: in float32 the difference of the
whole products would lose R to rounding, when the changes are small beside the factors. R is added to the server's own
tensor (`fedplat.aggregate.factors`) instead of W₀.
"""

from __future__ import annotations

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import BaseRule, Partial, Rule
from fedplat.aggregate.factors import FactorPair, add_product, aggregate_products, mean_of
from fedplat.model import Vector

FEDEX_LORA = "fedex_lora"


class FedExLora(BaseRule, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="rule", tag=FEDEX_LORA):
    """Options of FedEx-LoRA. Raises `ValueError` for a value out of range."""

    scaling: ranges.Rate
    """s = lora_alpha / r of the clients' adapters, the same for all clients and layers."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return aggregate_products(_subtract_product, restarts=False, scaling=self.scaling, name=FEDEX_LORA)


def _subtract_product(partial: Partial, pair: FactorPair, entries: range, step: Vector) -> None:
    add_product(step, mean_of(partial, pair.b), mean_of(partial, pair.a), entries.start, sign=-1.0)
