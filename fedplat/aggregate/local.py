"""The client's half of an algorithm: arithmetic on named NumPy arrays or torch tensors.

Every algorithm changes the gradient g of a local step at the weights w to `g + pull (w - w₀) + drift`: w₀ are the
weights at the start of the training, `pull` is a number, and `drift` has one constant array for each parameter. So any
implementation of local steps, for one client at a time or a whole cohort at once, supports all algorithms. After the
last step the algorithm returns the client's next state and the arrays that the client adds to its update.

An algorithm may also replace the loss of the steps (`make_loss`), and the weights at which their gradients are computed
(`perturb`). These two need autograd, so they are functions of torch modules and tensors.

An algorithm whose clients have models of their own (`start`) begins elsewhere than at the received version, and reports
what it exchanges with that version instead of how far the steps went.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from fedplat.aggregate import algebra as ranges

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays or tensors that support `+`, `-` and `*`, by the names of the model's parameters."""

CONTROL = "control/"
"""Prefix of the names of a model's control variates; the rest is the name of the tensor to which one belongs."""


@dataclass(frozen=True, slots=True)
class Correction:
    """The term added to the gradient g at the weights w: `pull (w - w₀) + drift`. An empty drift is 0."""

    pull: float = 0.0
    drift: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class UpdateDirection:
    """The result of local training, `displacement` = w₀ - w, made by steps of `learning_rate`.

    `steps` is the total weight of their gradients: their number, except with momentum or pull (`effective_steps`).
    `weights` are the trained weights w of an algorithm with an own loss, and all floating-point tensors of the client's
    model after the training of an algorithm with an own start; empty otherwise.
    """

    displacement: Arrays
    learning_rate: float
    steps: float
    weights: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class LocalEnding:
    """The result of a local algorithm: the client state for the next training, and the arrays added to the update."""

    remember: Arrays = field(default_factory=dict[str, Any])
    update: Arrays = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StartContext:
    """The received version and the client state, from which `start` finds where a client's training begins.

    `received` are the version's floating-point tensors by name, without control variates; `trained` are the names of
    those that the steps train. `learning_rate` is that of the round.
    """

    received: Arrays
    remembered: Arrays
    trained: Collection[str]
    learning_rate: float


@dataclass(frozen=True, slots=True)
class LocalStart:
    """The start of a client with a model of its own.

    `weights` are its values of all `received` tensors. `exchange` has the same names: the client reports it as its
    update, in place of the displacement, and loses it. The first gradient is that at `weights`; trained tensors lose
    the exchange with the first step, the others before it. `metrics` are added to the report.
    """

    weights: Arrays
    exchange: Arrays
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


LossFunction: TypeAlias = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Maps the module in training, inputs and targets of a batch to its mean loss, a scalar, and the module's outputs."""


@dataclass(frozen=True, slots=True)
class LossContext:
    """The start of a client's training, from which `make_loss` creates the loss of its steps.

    `loss(outputs, targets)` is the job's mean loss of a batch. `read_targets()` returns the targets of all examples of
    the client. `copy_module()` returns a copy of the module with the received model, in evaluation mode, whose
    parameters are not trained; `make_loss` calls it, not the loss. `remembered` is the client state.
    """

    loss: Callable[[Any, Any], Any]
    read_targets: Callable[[], Any]
    copy_module: Callable[[], Any]
    remembered: Arrays = field(default_factory=dict[str, Any])


def _no_correction(control: Arrays, remembered: Arrays) -> Correction:
    return Correction()


def _no_ending(correction: Correction, remembered: Arrays, direction: UpdateDirection) -> LocalEnding:
    return LocalEnding()


@dataclass(frozen=True, slots=True)
class LocalAlgorithm:
    """The client's half of an algorithm.

    `begin(control, remembered)` receives the model's control variates by the names of their tensors (empty without
    `needs_control`) and the client state (initially empty). `end(correction, remembered, direction)` receives the
    result of `begin`.

    `make_loss(context)` returns the loss of the client's steps; None stands for the job's loss. If `loss_is_mean`, the
    loss of a batch is the mean of the losses of its examples, each computed without the others; then several processes
    can compute a part of the batch each. `perturb(gradients)` receives the gradients of a step by the names of their
    parameters, and returns offsets, by name, for some or all of them: the step then uses the gradients at the weights
    plus the offsets, on the same examples.

    With `start(context)` the training begins at the client's own model, and the update is the exchange that it returns;
    w₀ stays the received version. With `nesterov` the momentum of SGD is Nesterov's, and with `keeps_optimizer` the
    optimizer continues with its state of the client's previous training.

    >>> LocalAlgorithm(lambda control, remembered: Correction(pull=0.1)).begin({}, {}).pull
    0.1
    """

    begin: Callable[[Arrays, Arrays], Correction] = _no_correction
    end: Callable[[Correction, Arrays, UpdateDirection], LocalEnding] = _no_ending
    needs_control: bool = False
    make_loss: Callable[[LossContext], LossFunction] | None = None
    loss_is_mean: bool = False
    perturb: Callable[[Arrays], Arrays] | None = None
    start: Callable[[StartContext], LocalStart] | None = None
    nesterov: bool = False
    keeps_optimizer: bool = False


class LocalSgd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="algorithm", tag="sgd"):
    """Plain local steps."""

    def build(self) -> LocalAlgorithm:
        """Return the algorithm."""
        return sgd()


class LocalFedProx(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="algorithm", tag="fedprox"):
    """Options of FedProx. Raises `ValueError` for a value out of range."""

    mu: ranges.Coefficient = 0.0
    """μ, the factor of the proximal term."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> LocalAlgorithm:
        """Return the algorithm with these options."""
        return fedprox(self.mu)


def sgd() -> LocalAlgorithm:
    """Return plain local steps (McMahan et al. 2017)."""
    return LocalAlgorithm()


def fedprox(mu: float) -> LocalAlgorithm:
    """Return steps with a proximal term, μ/2 ‖w - w₀‖², that keeps clients close to their base version.

    Source: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", arXiv 1812.06127, Algorithm 2.
    """
    return LocalAlgorithm(lambda control, remembered: Correction(pull=mu))


def effective_steps(num_steps: int, *, learning_rate: float, momentum: float, pull: float) -> float:
    """Return the total weight of the gradients of `num_steps` steps in the displacement, in units of the learning rate.

    It is how far a gradient of 1 at each step would move the weights: ‖a‖₁ in Wang et al. 2020, "Tackling the
    Objective Inconsistency Problem in Heterogeneous Federated Optimization", arXiv 2007.07481, Section 4.1.
    """
    if not momentum and not pull:
        return float(num_steps)
    displacement = velocity = 0.0
    for _ in range(num_steps):
        velocity = momentum * velocity + 1.0 - pull * learning_rate * displacement
        displacement += velocity
    return displacement
