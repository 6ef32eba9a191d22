"""FedDyn: each client updates a regularizer, so that the model on which all clients agree minimizes the total loss.

Source: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", arXiv 2111.04263, Algorithm 1. A client
minimizes L(θ) - ⟨λ, θ⟩ + α/2 ‖θ - θᵗ⁻¹‖² by local steps with the gradient g - λ + α (θ - θᵗ⁻¹), and stores
λ ← λ - α (θ - θᵗ⁻¹). The server, with P of m clients, stores h ← h - α/m Σ (θ - θᵗ⁻¹) and moves to mean(θ) - h/α.

Here the server stores -h/α instead, so that it does not need α: it grows by P/m mean(Δ), and the step is the mean of
the updates Δ plus it.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import BaseRule, ClientRequirements, Partial, Rule, State, Wrapper
from fedplat.aggregate.local import Arrays, Correction, LocalAlgorithm, LocalEnding, UpdateDirection
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Vector

NAME = "feddyn"
_STATE = "correction"


class FedDyn(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag=NAME):
    """Options of FedDyn. Raises `ValueError` for a value out of range."""

    num_clients: ranges.Population
    """m, the number of clients that may ever participate."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_feddyn(self)(weighted_mean())


class LocalFedDyn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="algorithm", tag=NAME):
    """Options of the client's half of FedDyn. Raises `ValueError` for a value out of range."""

    alpha: ranges.Rate
    """α, the factor of the regularizer."""

    def __post_init__(self) -> None:
        ranges.check(self)

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

        return dataclasses.replace(inner, init=init, apply=apply, requirements=ClientRequirements(NAME))

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
