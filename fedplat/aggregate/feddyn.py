"""FedDyn: a regularizer that clients learn, so that what they all agree on is a minimum of the whole loss.

Source: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", arXiv 2111.04263, Algorithm 1. A client
minimizes L(θ) - ⟨λ, θ⟩ + α/2 ‖θ - θᵗ⁻¹‖² by its local steps, whose gradient is g - λ + α (θ - θᵗ⁻¹), and remembers
λ ← λ - α (θ - θᵗ⁻¹). The server, with P of m clients, keeps h ← h - α/m Σ (θ - θᵗ⁻¹) and moves to mean(θ) - h/α.

Here the server remembers -h/α instead, so that it need not know α: it grows by P/m mean(Δ), and the step is the mean of
the updates Δ and this.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import ClientRequirements, Partial, Rule, State, Wrapper
from fedplat.aggregate.local import Arrays, Correction, LocalAlgorithm, LocalEnding, UpdateDirection
from fedplat.aggregate.mean import weighted_mean
from fedplat.model import Vector

NAME = "feddyn"
_STATE = "correction"


class FedDyn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag=NAME):
    """Options of FedDyn. A value out of its range is a `ValueError`."""

    num_clients: ranges.Population
    """m, the number of clients that may ever take part."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def build(self) -> Rule:
        """The rule with these options."""
        return server_feddyn(self)(weighted_mean())


def server_feddyn(options: FedDyn) -> Wrapper:
    """The server's half; remembers `correction`, -h/α, float32 of shape [size]."""

    def wrap(inner: Rule) -> Rule:
        def init(size: int) -> State:
            return {**inner.init(size), _STATE: np.zeros(size, np.float32)}

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            below = {name: vector for name, vector in state.items() if name != _STATE}
            mean, below = inner.apply(below, partial)
            correction = np.multiply(mean, partial.num_updates / options.num_clients, dtype=np.float32)
            correction += state[_STATE]
            return mean + correction, {**below, _STATE: correction}

        return dataclasses.replace(inner, init=init, apply=apply, counterpart=ClientRequirements(NAME))

    return wrap


def client_feddyn(alpha: float) -> LocalAlgorithm:
    """The client's half; it remembers λ, which is 0 at first."""

    def begin(control: Arrays, remembered: Arrays) -> Correction:
        return Correction(pull=alpha, drift={name: -1.0 * array for name, array in remembered.items()})

    def end(correction: Correction, remembered: Arrays, way: UpdateDirection) -> LocalEnding:
        return LocalEnding({name: alpha * moved + remembered.get(name, 0.0) for name, moved in way.moved.items()})

    return LocalAlgorithm(begin, end)
