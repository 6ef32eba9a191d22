"""FedAdam: Adam on the server.

Source: Reddi et al. 2021, "Adaptive Federated Optimization", arXiv 2003.00295, Algorithm 2, the line for FedAdam:
v ← β₂ v + (1 - β₂) Δ². Defaults as in the paper's experiments (Section 5).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedplat.aggregate import options as ranges
from fedplat.aggregate.adaptive import server_adaptive
from fedplat.aggregate.algebra import BaseRule, Rule, Wrapper
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Vector


class FedAdam(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedadam"):
    """Options of FedAdam. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 0.01
    """η, the step size; unlike FedAvg's, about the size of the step of one entry."""
    beta1: ranges.Decay = 0.9
    """β₁, the fraction of the first moment (the mean of the updates) that is kept."""
    beta2: ranges.Decay = 0.99
    """β₂, the fraction of the second moment (the mean of their squares) that is kept."""
    tau: ranges.Floor = 1e-3
    """τ, the degree of adaptivity: the smaller, the more equal the steps of all entries."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_adam(self)(weighted_mean())


def server_adam(options: FedAdam) -> Wrapper:
    """Wrap a rule in Adam on the server, without bias correction."""
    beta2, complement = np.float32(options.beta2), np.float32(1 - options.beta2)

    def second_moment(last: Vector, squared: Vector) -> Vector:
        moment = last * beta2
        moment += squared * complement
        return moment

    return server_adaptive(options, second_moment)
