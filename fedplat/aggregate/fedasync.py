"""FedAsync: the model moves a part of the way to each client's model, less for one that is stale.

Source: Xie et al. 2019, "Asynchronous Federated Optimization", arXiv 1903.03934, Algorithm 1: on every report x ← (1 -
m) x + m x_client, with m = mixing · s(t - τ) for a client that began with version τ. So the step is m (x_client - x),
with x_client = x_τ + update: unlike FedBuff's it takes the model back by what was committed since.

s comes from the job's mode, in the weights (`weighting = "uniform"`); those of the paper's Section 5.2 are "constant",
"polynomial" and "hinge". The paper's algorithm has `selection.goal = 1`; a larger buffer takes the mean of the steps.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import Rule
from fedplat.aggregate.fedavg import FedAvg, server_sgd
from fedplat.aggregate.fedbuff import divided_by_number
from fedplat.aggregate.mean import weighted_mean


class FedAsync(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedasync"):
    """Options of FedAsync. A value out of its range is a `ValueError`."""

    mixing: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.6
    """Alpha, the part of the way that the model moves to the one of a client that is not stale."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """The rule with these options."""
        rule = server_sgd(FedAvg(self.mixing))(divided_by_number(weighted_mean()))
        return dataclasses.replace(rule, from_latest=True)
