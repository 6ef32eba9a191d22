"""FedAvgM: FedAvg with momentum on the server.

Source: Hsu et al. 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335, Section 4.3: v ← β v + Δ; the model then moves by η v.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import BaseRule, Rule, State, Wrapper
from fedplat.aggregate.mean import weighted_mean
from fedplat.aggregate.optimizer import server_optimizer
from fedplat.model import Vector


class FedAvgM(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedavgm"):
    """Options of FedAvgM. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 1.0
    """η, the factor of the velocity."""
    momentum: ranges.Decay = 0.9
    """β, the fraction of the velocity that is kept."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_momentum(self)(weighted_mean())


def server_momentum(options: FedAvgM) -> Wrapper:
    """Wrap a rule in heavy-ball momentum on the server: v ← β v + Δ; x += η v."""

    def init(size: int) -> State:
        return {"velocity": np.zeros(size, np.float32)}

    def update(state: State, delta: Vector) -> tuple[Vector, State]:
        velocity = options.momentum * state["velocity"]
        velocity += delta
        return options.learning_rate * velocity, {"velocity": velocity}

    return server_optimizer(init, update)
