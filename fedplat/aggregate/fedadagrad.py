"""FedAdagrad: Adagrad on the server.

Source: Reddi et al. 2021, "Adaptive Federated Optimization", arXiv 2003.00295, Algorithm 2, the line for FedAdagrad:
v ← v + Δ². Defaults as in the paper's experiments (Section 5).
"""

from __future__ import annotations

from typing import ClassVar

from fedplat.aggregate import options as ranges
from fedplat.aggregate.adaptive import server_adaptive
from fedplat.aggregate.algebra import BaseRule, Rule, Wrapper
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Vector


class FedAdagrad(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedadagrad"):
    """Options of FedAdagrad. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 0.01
    """η, the step size; unlike FedAvg's, about the size of the step of one entry."""
    beta1: ranges.Decay = 0.0
    """β₁, the fraction of the first moment (the mean of the updates) that is kept; 0 is plain Adagrad."""
    tau: ranges.Floor = 1e-3
    """τ, the degree of adaptivity: the smaller, the more equal the steps of all entries."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_adagrad(self)(weighted_mean())


def server_adagrad(options: FedAdagrad) -> Wrapper:
    """Wrap a rule in Adagrad on the server: the second moment only grows."""

    def second_moment(last: Vector, squared: Vector) -> Vector:
        return last + squared

    return server_adaptive(options, second_moment)
