"""SCAFFOLD: control variates that correct the drift of local steps on clients with different data.

Source: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", arXiv 1910.06378,
Algorithm 1, with option II for the clients' variates: a local step is y ← y - η (g(y) - cᵢ + c); afterwards
cᵢ⁺ = cᵢ - c + (x - y) / (K η), and the client reports y - x and cᵢ⁺ - cᵢ. The server adds η_g mean(y - x) to x, and
|S| / N mean(cᵢ⁺ - cᵢ) to c.

The server's variate c is part of the model: for each tensor NAME a tensor `control/NAME`. With momentum, K is replaced
by the total weight of the gradients of K steps (`effective_steps`), so that cᵢ stays a mean of gradients.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import BaseRule, ClientRequirements, Partial, Rule, State, Wrapper
from fedplat.aggregate.local import CONTROL, Arrays, Correction, LocalAlgorithm, LocalEnding, UpdateDirection
from fedplat.aggregate.mean import weighted_mean
from fedplat.errors import ModelError
from fedplat.model import FLOATING, Parameters, Schema, Vector

NAME = "scaffold"


class Scaffold(BaseRule, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="rule", tag=NAME):
    """Options of SCAFFOLD. Raises `ValueError` for a value out of range."""

    num_clients: ranges.Population
    """N, the number of clients that may ever participate: the control variate is the mean over all of them."""
    learning_rate: ranges.Rate = 1.0
    """η_g, the factor of the mean update."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_scaffold(self)(weighted_mean())


class LocalScaffold(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="algorithm", tag=NAME):
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

        requirements = ClientRequirements(NAME, with_control, without_control, _misfit)
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


def _misfit(schema: Schema) -> str:
    """Return why a model does not fit the rule, or ""."""
    floating = [tensor for tensor in schema.tensors if tensor.dtype in FLOATING]
    own = {tensor.name: tensor for tensor in floating if not tensor.name.startswith(CONTROL)}
    expected = [(CONTROL + name, "F32", tensor.shape) for name, tensor in own.items()]
    is_float32 = all(tensor.dtype == "F32" for tensor in floating)
    if is_float32 and [(t.name, t.dtype, t.shape) for t in floating[len(own) :]] == expected:
        return ""
    return (
        f"the rule {NAME} needs a model of F32 tensors, followed by a tensor {CONTROL}NAME for each tensor NAME; "
        "`fedplat job submit` and fedplat.aggregate.scaffold.with_control() add them"
    )
