"""The client's half of an algorithm: arithmetic on named arrays, be they NumPy's or torch's.

Every algorithm changes the gradient g of a local step at the weights w to `g + pull (w - w₀) + drift`: w₀ are the
weights that the training began with, `pull` is a number, and `drift` has one constant array for each parameter. So
whoever computes local steps, one client at a time or a whole cohort at once, can do all of them. After the last step
the algorithm says what the client remembers and what it adds to its update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays or tensors that know `+`, `-` and `*`, by the names of the model's parameters."""

CONTROL = "control/"
"""What the names of a model's control variates begin with; the rest is the tensor that they belong to."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What is added to the gradient g at the weights w: `pull (w - w₀) + drift`. An empty drift is none."""

    pull: float = 0.0
    drift: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class UpdateDirection:
    """How far local training went: `moved` = w₀ - w, by steps of `learning_rate`.

    `steps` is what their gradients counted for together: their number, but for momentum and pull (`effective_steps`).
    """

    moved: Arrays
    learning_rate: float
    steps: float


@dataclass(frozen=True, slots=True)
class LocalEnding:
    """What the client remembers until its next training, and what it adds to its update."""

    remember: Arrays = field(default_factory=dict[str, Any])
    update: Arrays = field(default_factory=dict[str, Any])


def _no_ending(correction: Correction, remembered: Arrays, way: UpdateDirection) -> LocalEnding:
    return LocalEnding()


@dataclass(frozen=True, slots=True)
class LocalAlgorithm:
    """The client's half of an algorithm.

    `begin(control, remembered)` is given the model's control variates by the names of their tensors (none without
    `needs_control`) and what the client remembers (at first nothing). `end(correction, remembered, way)` is given what
    `begin` made of it.
    """

    begin: Callable[[Arrays, Arrays], Correction]
    end: Callable[[Correction, Arrays, UpdateDirection], LocalEnding] = _no_ending
    needs_control: bool = False


def sgd() -> LocalAlgorithm:
    """Plain local steps (McMahan et al. 2017)."""
    return LocalAlgorithm(lambda control, remembered: Correction())


def fedprox(mu: float) -> LocalAlgorithm:
    """A proximal term, μ/2 ‖w - w₀‖², that keeps clients near to the model they began with.

    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", arXiv 1812.06127, Algorithm 2.
    """
    return LocalAlgorithm(lambda control, remembered: Correction(pull=mu))


def effective_steps(num_steps: int, *, learning_rate: float, momentum: float, pull: float) -> float:
    """What the gradients of `num_steps` steps count for together in the way that they lead, in learning rates.

    It is how far a gradient of 1 at each step would move the weights: ‖a‖₁ in Wang et al. 2020, "Tackling the
    Objective Inconsistency Problem in Heterogeneous Federated Optimization", arXiv 2007.07481, Section 4.1.
    """
    if not momentum and not pull:
        return float(num_steps)
    way = velocity = 0.0
    for _ in range(num_steps):
        velocity = momentum * velocity + 1.0 - pull * learning_rate * way
        way += velocity
    return way
