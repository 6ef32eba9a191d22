"""FedAvg: the model moves by the weighted mean of the updates.

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
arXiv 1602.05629, Algorithm 1; with a server learning rate as in Reddi et al. 2021 (FedOpt with SGD).
"""

from __future__ import annotations

from typing import ClassVar

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import BaseRule, Rule, State, Wrapper
from fedplat.aggregate.mean import weighted_mean
from fedplat.aggregate.optimizer import server_optimizer
from fedplat.model import Vector


class FedAvg(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedavg"):
    """Options of FedAvg. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 1.0
    """η, the factor of the mean update; 1 is the paper's algorithm."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_sgd(self)(weighted_mean())


def server_sgd(options: FedAvg) -> Wrapper:
    """Wrap a rule in plain gradient descent on the server: x += η Δ."""

    def init(size: int) -> State:
        return {}

    def update(state: State, delta: Vector) -> tuple[Vector, State]:
        return options.learning_rate * delta, state

    return server_optimizer(init, update)
