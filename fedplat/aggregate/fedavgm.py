"""FedAvgM: FedAvg with momentum on the server.

Source: Hsu et al. 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335, Section 4.3: v ← β v + Δ; the model then moves by η v. With Nesterov's momentum it
moves by η (Δ + β v), as `torch.optim.SGD(nesterov=True)` does; that is the outer optimizer of DiLoCo, with η = 0.7 and
β = 0.9 (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105).
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
    nesterov: bool = False
    """Nesterov's momentum instead of the heavy ball: the model moves by η (Δ + β v), with the new velocity v."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_momentum(self)(weighted_mean())


def server_momentum(options: FedAvgM) -> Wrapper:
    """Wrap a rule in momentum on the server: v ← β v + Δ; x += η v, or with `nesterov` x += η (Δ + β v)."""

    def init(size: int) -> State:
        return {"velocity": np.zeros(size, np.float32)}

    def update(state: State, delta: Vector) -> tuple[Vector, State]:
        velocity = options.momentum * state["velocity"]
        velocity += delta
        ahead = delta + options.momentum * velocity if options.nesterov else velocity
        return options.learning_rate * ahead, {"velocity": velocity}

    return server_optimizer(init, update)
