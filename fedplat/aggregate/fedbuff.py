"""FedBuff: the server's half of buffered asynchronous training.

Source: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", arXiv 2106.06639, Algorithm 1:
the updates of a full buffer are added up and divided by their number K. It is a constant: updates that count for less,
since they are stale, shorten the step (Section 5.1: weights s(τ) = 1 / √(1 + τ) of updates that are τ versions old).
Divided by the sum of the weights instead, a buffer of stale updates would move the model as far as one of fresh ones.

The weights come from the job's mode, with every update; so the job must have `weighting = "uniform"`.
"""

from __future__ import annotations

import dataclasses

import msgspec

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import Partial, Rule, State
from fedplat.aggregate.fedavg import FedAvg, server_sgd
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Vector


class FedBuff(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedbuff"):
    """Options of FedBuff. A value out of its range is a `ValueError`."""

    learning_rate: ranges.Rate = 1.0
    """η_g, what the sum divided by K is multiplied by."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """The rule with these options."""
        return server_sgd(FedAvg(self.learning_rate))(divided_by_number(weighted_mean()))


def divided_by_number(inner: Rule) -> Rule:
    """Makes a weighted mean the weighted sum divided by the number of updates."""

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        mean, state = inner.apply(state, partial)
        return mean * (partial.weight / partial.num_updates), state

    return dataclasses.replace(inner, apply=apply, unit_weights=True)
