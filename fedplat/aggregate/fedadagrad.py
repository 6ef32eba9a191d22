"""FedAdagrad: Adagrad on the server.

Source: Reddi et al. 2021, "Adaptive Federated Optimization", arXiv 2003.00295, Algorithm 2, the line for
FedAdagrad: v ← v + Δ². Defaults as in the paper's experiments (Section 5).
"""

from __future__ import annotations

import msgspec

from fedplat.aggregate import options as ranges
from fedplat.aggregate.adaptive import server_adaptive
from fedplat.aggregate.algebra import Rule, Wrapper
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Vector


class FedAdagrad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedadagrad"):
    """Options of FedAdagrad. A value out of its range is a `ValueError`."""

    learning_rate: ranges.Rate = 0.01
    """η, the step size; unlike FedAvg's it is about the size of a step of one entry."""
    beta1: ranges.Decay = 0.0
    """β₁, the part of the first moment (the mean of the updates) that is kept; 0 is Adagrad proper."""
    tau: ranges.Floor = 1e-3
    """τ, the degree of adaptivity: the smaller, the more the steps of the entries are evened out."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """The rule with these options."""
        return server_adagrad(self)(weighted_mean())


def server_adagrad(options: FedAdagrad) -> Wrapper:
    """Adagrad on the server: the second moment only grows."""

    def second_moment(last: Vector, squared: Vector) -> Vector:
        return last + squared

    return server_adaptive(options, second_moment)
