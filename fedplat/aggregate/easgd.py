"""Elastic averaging, the centre's half: the model is drawn to the clients' by elastic forces.

Source: Zhang et al. 2015, "Deep learning with Elastic Averaging SGD", arXiv 1412.6651, equation 4: with the centre x̃
and p workers' models x_i, x̃ ← (1 - β) x̃ + β · mean(x_i); β is called moving rate (0.9 in the paper's Section 5).

The workers' half is the same force on them, x_i ← x_i - (β / p) (x_i - x̃), in each of their steps or every few. It is
the local step's: `algorithm = "fedprox"` pulls each step to the model that the client was given, by learning_rate · mu.
Unlike the paper's workers, a client begins its next training at the centre and not at its own model.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import Rule
from fedplat.aggregate.fedavg import FedAvg, server_sgd
from fedplat.aggregate.mean import weighted_mean


class Easgd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="easgd"):
    """Options of elastic averaging. A value out of its range is a `ValueError`."""

    moving_rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """β, the part of the way that the centre moves to the mean of the clients' models."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """The rule with these options."""
        return dataclasses.replace(server_sgd(FedAvg(self.moving_rate))(weighted_mean()), from_latest=True)
