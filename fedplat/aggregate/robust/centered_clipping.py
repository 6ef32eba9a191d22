"""Centered clipping: every update pulls the last round's aggregate towards it, with a force of at most a radius.

Source: Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", ICML 2021 (arXiv
2012.10333), Section 4: v ← v + 1/n Σ (x_i - v) min(1, τ / ‖x_i - v‖). v starts at the last aggregate.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import options as ranges
from fedplat.aggregate.algebra import Partial, Rule, State, Wrapper
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, make_wrapper
from fedplat.model import Vector

_CENTRE = "clipping_centre"


class CenteredClipping(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="centered-clipping"
):
    """Options of centered clipping. Raises `ValueError` for a value out of range."""

    radius: ranges.Rate
    """τ, in the units of the model's entries: about the distance between two honest updates."""
    iterations: Annotated[int, Meta(ge=1, le=1000)] = 1
    """L, the number of moves of the centre in a round."""

    def __post_init__(self) -> None:
        ranges.check(self)

    def fewest(self, byzantine: int) -> int:
        """Return the smallest number of updates of which `byzantine` may be arbitrary."""
        return 2 * byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper, with pre-aggregation by `before`. Its state is the vector `clipping_centre`."""

        def reduce(inputs: RobustInputs) -> Vector:
            rows = inputs.rows.with_vector(-1)  # the centre
            number = len(rows) - 1
            shares = np.eye(number + 1)[-1]
            for _ in range(self.iterations):
                distances = rows.distances_to(shares)[:number]
                pull = np.minimum(1, self.radius / np.maximum(distances, self.radius)) / number
                shares = shares * (1 - pull.sum())
                shares[:number] += pull
            return rows.weighted_sum(shares)

        return lambda rule: _remember_centre(make_wrapper(reduce, before, extra=[_CENTRE])(rule))


def _remember_centre(inner: Rule) -> Rule:
    """Add the aggregate of the round, before any optimizer, to the state: it is the next centre."""

    def init(size: int) -> State:
        return {**inner.init(size), _CENTRE: np.zeros(size, np.float32)}

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        below = {name: vector for name, vector in state.items() if name != _CENTRE}
        step, below = inner.apply(below, partial)
        return step, {**below, _CENTRE: partial.total.copy()}

    return dataclasses.replace(inner, init=init, apply=apply)
