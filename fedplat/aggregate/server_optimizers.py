"""Server optimizers (FedAvg, FedAvgM, FedAdagrad, FedAdam, FedYogi): from a round's mean update to the model's step.

Source: Reddi et al. 2021, "Adaptive Federated Optimization", arXiv 2003.00295, Algorithms 1 (FedOpt) and 2. The mean
update Δ takes the place of a negative gradient, and ServerOpt is any first-order method. The adaptive methods compute
m ← β₁ m + (1 - β₁) Δ; v; x += η m / (√v + τ), without bias correction, and v starts at τ²:

- FedAdagrad: v ← v + Δ²;
- FedAdam: v ← β₂ v + (1 - β₂) Δ²;
- FedYogi: v ← v - (1 - β₂) Δ² sign(v - Δ²).

Defaults are as in the paper's experiments (Section 5).

FedAvg: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
arXiv 1602.05629, Algorithm 1; with a server learning rate as in Reddi et al. 2021 (FedOpt with SGD).

FedAvgM: Hsu et al. 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv 1909.06335, Section 4.3: v ← β v + Δ; the model then moves by η v. With Nesterov's momentum it
moves by η (Δ + β v), as `torch.optim.SGD(nesterov=True)` does; that is the outer optimizer of DiLoCo, with η = 0.7 and
β = 0.9 (Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv 2311.08105).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Protocol

import numpy as np

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate import mean
from fedplat.aggregate.algebra import BaseRule, Partial, Rule, State, Wrapper
from fedplat.model import Vector, blocks


def server_optimizer(init: Callable[[int], State], update: Callable[[State, Vector], tuple[Vector, State]]) -> Wrapper:
    """Wrap a rule so that `update(state, delta)` computes the step; `delta` is the wrapped rule's step.

    `init(size)` creates the optimizer's own named vectors, each of shape [size]; `update` receives and returns only
    these, and must not modify its arguments. Optimizers can be nested if their names differ, else `init` raises
    `ValueError`.
    """
    names = frozenset(init(0))

    def wrap(inner: Rule) -> Rule:
        def init_all(size: int) -> State:
            below = inner.init(size)
            if twice := names & below.keys():
                raise ValueError(f"two nested optimizers both have the state {min(twice)!r}; nest different ones")
            return {**below, **init(size)}

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            own = {name: vector for name, vector in state.items() if name in names}
            below = {name: vector for name, vector in state.items() if name not in names}
            delta, below = inner.apply(below, partial)
            step, own = update(own, delta)
            return step, {**below, **own}

        return dataclasses.replace(inner, init=init_all, apply=apply)

    return wrap


class FedAvg(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedavg"):
    """Options of FedAvg. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 1.0
    """η, the factor of the mean update; 1 is the paper's algorithm."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_sgd(self)(mean.weighted_mean())


def server_sgd(options: FedAvg) -> Wrapper:
    """Wrap a rule in plain gradient descent on the server: x += η Δ."""

    def init(size: int) -> State:
        return {}

    def update(state: State, delta: Vector) -> tuple[Vector, State]:
        return options.learning_rate * delta, state

    return server_optimizer(init, update)


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
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_momentum(self)(mean.weighted_mean())


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


SecondMoment = Callable[[Vector, Vector], Vector]
"""A function from the last v and Δ² to the next v, entry by entry; modifies neither argument."""


class AdaptiveOptions(Protocol):
    """The options that all adaptive methods share; the options records explain them."""

    @property
    def learning_rate(self) -> float:
        """η."""
        ...

    @property
    def beta1(self) -> float:
        """β₁."""
        ...

    @property
    def tau(self) -> float:
        """τ."""
        ...


def server_adaptive(options: AdaptiveOptions, second_moment: SecondMoment) -> Wrapper:
    """Wrap a rule in Algorithm 2 of the paper, with `second_moment` as the rule for v.

    The state is `first_moment` (m) and `second_moment` (v), float32 of shape [size].
    """
    beta1, eta, tau = options.beta1, options.learning_rate, options.tau

    def init(size: int) -> State:
        return {"first_moment": np.zeros(size, np.float32), "second_moment": np.full(size, tau**2, np.float32)}

    def update(state: State, delta: Vector) -> tuple[Vector, State]:
        first, second, step = (np.empty_like(delta) for _ in range(3))
        for block in blocks(delta.size):  # temporaries of a block's size, not of the model's
            part = delta[block]
            first[block] = beta1 * state["first_moment"][block] + (1 - beta1) * part
            second[block] = second_moment(state["second_moment"][block], np.square(part))
            step[block] = eta * first[block] / (np.sqrt(second[block]) + tau)
        return step, {"first_moment": first, "second_moment": second}

    return server_optimizer(init, update)


class FedAdagrad(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedadagrad"):
    """Options of FedAdagrad. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 0.01
    """η, the step size; unlike FedAvg's, about the size of the step of one entry."""
    beta1: ranges.Decay = 0.0
    """β₁, the fraction of the first moment (the mean of the updates) that is kept; 0 is plain Adagrad."""
    tau: ranges.Floor = 1e-3
    """τ, the degree of adaptivity: the smaller, the more equal the steps of all entries."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_adagrad(self)(mean.weighted_mean())


def server_adagrad(options: FedAdagrad) -> Wrapper:
    """Wrap a rule in Adagrad on the server: the second moment only grows."""

    def second_moment(last: Vector, squared: Vector) -> Vector:
        return last + squared

    return server_adaptive(options, second_moment)


class FedAdam(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedadam"):
    """Options of FedAdam. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 0.01
    """η, the step size; unlike FedAvg's, about the size of the step of one entry."""
    beta1: ranges.Decay = 0.9
    """β₁, the fraction of the first moment (the mean of the updates) that is kept."""
    beta2: ranges.Decay = 0.99
    """β₂, the fraction of the second moment (the mean of their squares) that is kept."""
    tau: ranges.Floor = 1e-3
    """τ, the degree of adaptivity: the smaller, the more equal the steps of all entries."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_adam(self)(mean.weighted_mean())


def server_adam(options: FedAdam) -> Wrapper:
    """Wrap a rule in Adam on the server, without bias correction."""
    beta2, complement = np.float32(options.beta2), np.float32(1 - options.beta2)

    def second_moment(last: Vector, squared: Vector) -> Vector:
        moment = last * beta2
        moment += squared * complement
        return moment

    return server_adaptive(options, second_moment)


class FedYogi(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedyogi"):
    """Options of FedYogi. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 0.01
    """η, the step size; unlike FedAvg's, about the size of the step of one entry."""
    beta1: ranges.Decay = 0.9
    """β₁, the fraction of the first moment (the mean of the updates) that is kept."""
    beta2: ranges.Decay = 0.99
    """β₂: the second moment moves towards the squared update by 1 - β₂ times the squared update."""
    tau: ranges.Floor = 1e-3
    """τ, the degree of adaptivity: the smaller, the more equal the steps of all entries."""

    works_on_mean: ClassVar[bool] = True

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_yogi(self)(mean.weighted_mean())


def server_yogi(options: FedYogi) -> Wrapper:
    """Wrap a rule in Yogi on the server: the second moment changes by a bounded amount, so it decays slowly."""
    complement = np.float32(1 - options.beta2)

    def second_moment(last: Vector, squared: Vector) -> Vector:
        change = squared * complement
        change *= np.sign(last - squared)
        np.subtract(last, change, out=change)
        return change

    return server_adaptive(options, second_moment)
