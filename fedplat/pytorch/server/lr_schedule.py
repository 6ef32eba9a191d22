"""The learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import torch

Scaling = Literal["none", "linear", "sqrt"]
_GROWTH: Final[Mapping[Scaling, float]] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def factor(scaling: Scaling, num_ranks: int, warmup_steps: int, step: int) -> float:
    """Return the factor of the learning rate in a step; steps count from 0.

    "linear": the number of ranks k, because a step of k batches replaces k steps (Goyal et al. 2017, arXiv 1706.02677,
    Section 2.1); "sqrt": its root, which keeps the variance of a step (Krizhevsky 2014, arXiv 1404.5997, Section 5).
    Over `warmup_steps` it grows from 1, by the same amount at each step (Goyal et al., Section 2.2).
    """
    full = math.pow(num_ranks, _GROWTH[scaling])
    return full if step >= warmup_steps else 1.0 + (full - 1.0) * step / warmup_steps


class LearningRates:
    """The learning rates of an optimizer, which were configured for one rank."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._base = [float(group["lr"]) for group in self._groups]

    def multiply(self, by: float) -> None:
        """Set the rates of the next step to the configured ones times a factor."""
        for group, base in zip(self._groups, self._base, strict=True):
            group["lr"] = base * by
