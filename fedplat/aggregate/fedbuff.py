"""FedBuff: the server's half of buffered asynchronous training.

Source: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", arXiv 2106.06639, Algorithm 1:
the weighted updates of a full buffer are added up and divided by their number K. K is a constant, so the lower weights
of stale updates shorten the step (Section 5.1: weights s(τ) = 1 / √(1 + τ) of updates that are τ versions old). If the
sum were divided by the sum of the weights instead, stale updates would move the model as far as fresh ones.

The job's mode sets the weight of every update, so the job must have `weighting = "uniform"`.
"""

from __future__ import annotations

import dataclasses

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import BaseRule, Partial, Rule, State
from fedplat.aggregate.fedavg import FedAvg, server_sgd
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Vector


class FedBuff(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedbuff"):
    """Options of FedBuff. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 1.0
    """η_g, the factor of the sum divided by K."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_sgd(FedAvg(self.learning_rate))(divide_by_number(weighted_mean()))


def divide_by_number(inner: Rule) -> Rule:
    """Turn a weighted mean into the weighted sum divided by the number of updates."""

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        mean, state = inner.apply(state, partial)
        return mean * (partial.weight / partial.num_updates), state

    return dataclasses.replace(inner, apply=apply, unit_weights=True)
