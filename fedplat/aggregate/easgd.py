"""Elastic averaging, the centre's half: elastic forces pull the model towards the clients' models.

Source: Zhang et al. 2015, "Deep learning with Elastic Averaging SGD", arXiv 1412.6651, equation 4: with the centre x̃
and p workers' models x_i, x̃ ← (1 - β) x̃ + β · mean(x_i); β is called moving rate (0.9 in the paper's Section 5).

The workers' half is the same force on them, x_i ← x_i - (β / p) (x_i - x̃), in each of their steps or every few. It is
part of the local step: `algorithm = "fedprox"` pulls each step towards the base version, by learning_rate · mu. Unlike
the paper's workers, a client starts its next training at the centre and not at its own model.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import BaseRule, Rule
from fedplat.aggregate.fedavg import FedAvg, server_sgd
from fedplat.aggregate.mean import weighted_mean


class Easgd(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="easgd"):
    """Options of elastic averaging. Raises `ValueError` for a value out of range."""

    moving_rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """β, the fraction of the distance that the centre moves towards the mean of the clients' models."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return dataclasses.replace(server_sgd(FedAvg(self.moving_rate))(weighted_mean()), from_latest=True)
