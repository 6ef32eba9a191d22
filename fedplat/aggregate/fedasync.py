"""FedAsync: the model moves a fraction of the distance to each client's model, a smaller one for a stale client.

Source: Xie et al. 2019, "Asynchronous Federated Optimization", arXiv 1903.03934, Algorithm 1: on every report x ← (1 -
m) x + m x_client, with m = mixing · s(t - τ) for a client that started from version τ. So the step is m (x_client - x),
with x_client = x_τ + update: unlike FedBuff's step, it partly undoes the steps committed since version τ.

s is in the weights, set by the job's mode (`weighting = "uniform"`); the functions of the paper's Section 5.2 are
"constant", "polynomial" and "hinge". The paper's algorithm has `selection.goal = 1`; a larger buffer uses the mean of
the steps.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import BaseRule, Rule
from fedplat.aggregate.fedavg import FedAvg, server_sgd
from fedplat.aggregate.fedbuff import divide_by_number
from fedplat.aggregate.mean import weighted_mean


class FedAsync(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedasync"):
    """Options of FedAsync. Raises `ValueError` for a value out of range."""

    mixing: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.6
    """Alpha, the fraction of the distance that the model moves towards the model of a client that is not stale."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        rule = server_sgd(FedAvg(self.mixing))(divide_by_number(weighted_mean()))
        return dataclasses.replace(rule, from_latest=True)
