"""SCAFFOLD, FedDyn and elastic averaging: against the drift of clients, which keep state from round to round.

Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", arXiv 1910.06378,
Algorithm 1, with option II for the clients' variates: a local step is y ← y - η (g(y) - cᵢ + c); afterwards
cᵢ⁺ = cᵢ - c + (x - y) / (K η), and the client reports y - x and cᵢ⁺ - cᵢ. The server adds η_g mean(y - x) to x, and
|S| / N mean(cᵢ⁺ - cᵢ) to c.

The server's variate c is part of the model: for each tensor NAME a tensor `control/NAME`. With momentum, K is replaced
by the total weight of the gradients of K steps (`effective_steps`), so that cᵢ stays a mean of gradients.

Source: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", arXiv 2111.04263, Algorithm 1. A client
minimizes L(θ) - ⟨λ, θ⟩ + α/2 ‖θ - θᵗ⁻¹‖² by local steps with the gradient g - λ + α (θ - θᵗ⁻¹), and stores
λ ← λ - α (θ - θᵗ⁻¹). The server, with P of m clients, stores h ← h - α/m Σ (θ - θᵗ⁻¹) and moves to mean(θ) - h/α.

Here the server stores -h/α instead, so that it does not need α: it grows by P/m mean(Δ), and the step is the mean of
the updates Δ plus it.

Source: Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv 1412.6651, Section 3 and
Algorithms 1 (asynchronous EASGD) and 2 (EAMSGD, Nesterov's momentum δ). With the centre x̃, a client's own model x_i,
the learning rate η and α = η · rho, a client does this every τ steps:

    x ← x_i;   x_i ← x_i - α (x - x̃);   x̃ ← x̃ + α (x - x̃)

and in each step x_i ← x_i - η g(x), or with momentum v ← δ v - η g(x + δ v), x_i ← x_i + v. So the first gradient after
an exchange is that at the weights before it, as in both algorithms.

The server's model is x̃. A client reports e = α (x_i - x̃) as its update, against the version that it received, and then
makes its τ steps. The server adds the sum of the differences e, not their mean. With p reports a round, all against the
latest version, this is the synchronous form with the moving rate β = p α; with `goal = 1` the clients take turns, and
in the buffered mode with `goal = 1` it is the asynchronous form.

A client's x_i is its client state. It takes effect only if the server has merged e, so both halves of an exchange count
or neither, and exchanges keep x̃ + Σ x_i unchanged.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import msgspec
import numpy as np

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate import local
from fedplat.aggregate.algebra import BaseRule, ClientRequirements, Partial, Rule, State, Wrapper
from fedplat.aggregate.local import CONTROL, Arrays, Correction, LocalAlgorithm, LocalEnding, UpdateDirection
from fedplat.aggregate.mean import weighted_mean
from fedplat.errors import ModelError
from fedplat.model import FLOATING, Parameters, Schema, Vector

SCAFFOLD = "scaffold"


class Scaffold(BaseRule, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="rule", tag=SCAFFOLD):
    """Options of SCAFFOLD. Raises `ValueError` for a value out of range."""

    num_clients: ranges.Population
    """N, the number of clients that may ever participate: the control variate is the mean over all of them."""
    learning_rate: ranges.Rate = 1.0
    """η_g, the factor of the mean update."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_scaffold(self)(weighted_mean())


class LocalScaffold(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="algorithm", tag=SCAFFOLD):
    """The client's half of SCAFFOLD."""

    def build(self) -> LocalAlgorithm:
        """Return the algorithm."""
        return client_scaffold()


def server_scaffold(options: Scaffold) -> Wrapper:
    """Wrap a rule in the server's half, for models `with_control`: their vector is x, then c of the same length."""

    def wrap(inner: Rule) -> Rule:
        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            step, state = inner.apply(state, partial)
            half = step.size // 2
            step[:half] *= options.learning_rate
            step[half:] *= partial.num_updates / options.num_clients
            return step, state

        requirements = ClientRequirements(SCAFFOLD, with_control, without_control, _scaffold_misfit)
        return dataclasses.replace(inner, apply=apply, blockwise=False, requirements=requirements)

    return wrap


def client_scaffold() -> LocalAlgorithm:
    """Return the client's half; the client state is cᵢ, initially 0."""

    def begin(control: Arrays, remembered: Arrays) -> Correction:
        return Correction(drift={name: c - remembered.get(name, 0.0) for name, c in control.items()})

    def end(correction: Correction, remembered: Arrays, direction: UpdateDirection) -> LocalEnding:
        if not direction.steps:
            return LocalEnding()
        length = direction.learning_rate * direction.steps
        variates = {name: moved / length - correction.drift[name] for name, moved in direction.displacement.items()}
        changes = {CONTROL + name: after - remembered.get(name, 0.0) for name, after in variates.items()}
        return LocalEnding(variates, changes)

    return LocalAlgorithm(begin, end, needs_control=True)


def with_control(model: Parameters) -> Parameters:
    """Append control variates of zeros to the model's own tensors; a model that has them is returned unchanged.

    Raises `ModelError` for a model whose floating-point tensors are not all float32.
    """
    if any(name.startswith(CONTROL) for name in model):
        return model
    if other := [tensor for tensor in model.schema.tensors if tensor.dtype in FLOATING and tensor.dtype != "F32"]:
        raise ModelError(f"tensor {other[0].name!r} is {other[0].dtype}; SCAFFOLD needs F32 for its control variates")
    control = {CONTROL + name: np.zeros_like(array) for name, array in model.items() if array.dtype == np.float32}
    return Parameters.from_arrays({**model, **control}, model.schema.carry)


def without_control(model: Parameters) -> Parameters:
    """Return the model without its control variates."""
    own = {name: array for name, array in model.items() if not name.startswith(CONTROL)}
    return model if len(own) == len(model) else Parameters.from_arrays(own, model.schema.carry)


def _scaffold_misfit(schema: Schema) -> str:
    """Return why a model does not fit the rule, or ""."""
    floating = [tensor for tensor in schema.tensors if tensor.dtype in FLOATING]
    own = {tensor.name: tensor for tensor in floating if not tensor.name.startswith(CONTROL)}
    expected = [(CONTROL + name, "F32", tensor.shape) for name, tensor in own.items()]
    is_float32 = all(tensor.dtype == "F32" for tensor in floating)
    if is_float32 and [(t.name, t.dtype, t.shape) for t in floating[len(own) :]] == expected:
        return ""
    return (
        f"the rule {SCAFFOLD} needs a model of F32 tensors, followed by a tensor {CONTROL}NAME for each tensor NAME; "
        "`fedplat job submit` and fedplat.aggregate.drift.with_control() add them"
    )


FEDDYN = "feddyn"
_STATE = "correction"


class FedDyn(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag=FEDDYN):
    """Options of FedDyn. Raises `ValueError` for a value out of range."""

    num_clients: ranges.Population
    """m, the number of clients that may ever participate."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_feddyn(self)(weighted_mean())


class LocalFedDyn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="algorithm", tag=FEDDYN):
    """Options of the client's half of FedDyn. Raises `ValueError` for a value out of range."""

    alpha: ranges.Rate
    """α, the factor of the regularizer."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> LocalAlgorithm:
        """Return the algorithm with these options."""
        return client_feddyn(self.alpha)


def server_feddyn(options: FedDyn) -> Wrapper:
    """Wrap a rule in the server's half; its state is `correction`, -h/α, float32 of shape [size]."""

    def wrap(inner: Rule) -> Rule:
        def init(size: int) -> State:
            return {**inner.init(size), _STATE: np.zeros(size, np.float32)}

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            below = {name: vector for name, vector in state.items() if name != _STATE}
            mean, below = inner.apply(below, partial)
            correction = np.multiply(mean, partial.num_updates / options.num_clients, dtype=np.float32)
            correction += state[_STATE]
            return mean + correction, {**below, _STATE: correction}

        return dataclasses.replace(inner, init=init, apply=apply, requirements=ClientRequirements(FEDDYN))

    return wrap


def client_feddyn(alpha: float) -> LocalAlgorithm:
    """Return the client's half; the client state is λ, initially 0."""

    def begin(control: Arrays, remembered: Arrays) -> Correction:
        return Correction(pull=alpha, drift={name: -1.0 * array for name, array in remembered.items()})

    def end(correction: Correction, remembered: Arrays, direction: UpdateDirection) -> LocalEnding:
        return LocalEnding(
            {name: alpha * moved + remembered.get(name, 0.0) for name, moved in direction.displacement.items()}
        )

    return LocalAlgorithm(begin, end)


EASGD = "easgd"


class Easgd(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag=EASGD):
    """The server's half of elastic averaging: the centre moves by the sum of the clients' elastic differences."""

    def build(self) -> Rule:
        """Return the rule."""
        return server_easgd()


class LocalEasgd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="algorithm", tag=EASGD):
    """Options of the client's half of elastic averaging. Raises `ValueError` for a value out of range."""

    rho: ranges.Rate
    """The strength of the elastic force; a client moves `learning_rate * rho` of its way to the centre."""
    tau: Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)] = 0
    """τ, the local steps after each exchange; 0 for those of `epochs`."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> local.LocalAlgorithm:
        """Return the algorithm with these options."""
        return client_easgd(self.rho)


def server_easgd() -> Rule:
    """Return the rule with the step Σ weight · e; the weights of its jobs are 1.

    `apply` raises `ValueError` like that of `weighted_mean`.
    """
    mean = weighted_mean()

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        mean.apply({}, dataclasses.replace(partial, total=partial.total[:0]))  # for its checks
        return partial.total.copy(), state

    return dataclasses.replace(
        mean, apply=apply, unit_weights=True, requirements=ClientRequirements(EASGD, misfit=_easgd_misfit)
    )


def client_easgd(rho: float) -> local.LocalAlgorithm:
    """Return the client's half; the client state is x_i, initially the centre, and the optimizer's state.

    It reports the metric `centre_distance`, ‖x_i - x̃‖ over the trained weights before the exchange.
    """

    def start(context: local.StartContext) -> local.LocalStart:
        own = {name: context.remembered.get(name, centre) for name, centre in context.received.items()}
        apart = {name: own[name] - centre for name, centre in context.received.items()}
        alpha = context.learning_rate * rho
        distance = math.sqrt(sum(_squares(apart[name]) for name in context.trained))
        return local.LocalStart(
            weights=own,
            exchange={name: alpha * difference for name, difference in apart.items()},
            metrics={"centre_distance": distance},
        )

    def end(
        correction: local.Correction, remembered: local.Arrays, direction: local.UpdateDirection
    ) -> local.LocalEnding:
        return local.LocalEnding(remember=direction.weights)

    return local.LocalAlgorithm(end=end, start=start, nesterov=True, keeps_optimizer=True)


def _easgd_misfit(schema: Schema) -> str:
    """Return why a model does not fit the rule, or ""."""
    for tensor in schema.tensors:
        if tensor.dtype in FLOATING and tensor.dtype not in ("F32", "F64"):
            return (
                f"the rule {EASGD} needs a model of F32 or F64 tensors, so that a client loses what the centre gains, "
                f"and tensor {tensor.name!r} is {tensor.dtype}"
            )
    return ""


def _squares(array: Any) -> float:
    return float((array * array).sum())
