"""Centered clipping and FLTrust: updates are compared with a reference that is trusted.

Source: Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization", ICML 2021 (arXiv
2012.10333), Section 4: v ← v + 1/n Σ (x_i - v) min(1, τ / ‖x_i - v‖). v starts at the last aggregate.

Source: Cao et al. 2021, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021 (arXiv
2012.13995), Algorithm 2: the trust score of an update is max(0, its cosine with the root update); each update is scaled
to the root update's length, and averaged with its score as weight.

In the paper the server trains the root update on its own data. Here no server data is needed: the root update is the
mean of the updates of the clients that the job trusts, identified by their ids. Labels cannot identify them, since
clients set their own labels. If no other update has a positive score, the result is the root update.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import algebra as ranges
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
        ranges.check_ranges(self)

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


class FLTrust(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="fltrust"):
    """Options of FLTrust. Raises `ValueError` for a value out of range."""

    trusted: Annotated[tuple[str, ...], Meta(min_length=1, max_length=1000)]
    """Ids of the trusted clients."""

    def fewest(self, byzantine: int) -> int:
        """Return `byzantine` + 1: all updates may be arbitrary except one, of a trusted client."""
        return byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        """Return the wrapper. Its `gather` raises `ValueError` if there is no update of a trusted client."""
        trusted = frozenset(self.trusted)

        def reduce(inputs: RobustInputs) -> Vector:
            is_root = np.array([each.client_id in trusted for each in inputs.contributions])
            if not is_root.any():
                raise ValueError("there is no update of a client that robust.rule.trusted names; FLTrust needs one")
            root = is_root / is_root.sum()
            products = (inputs.rows.gram * root).sum(axis=1)  # of each update with the root update
            length = np.sqrt(max((products * root).sum(), 0.0))
            lengths = np.sqrt(np.diagonal(inputs.rows.gram))
            # An update of zeros has no direction, and a negative score counts as 0.
            useful = ~is_root & (lengths > 0) & (products > 0) & (length > 0)
            scores = np.where(useful, products, 0) / np.where(useful, lengths * length, 1)
            if not useful.any():
                return inputs.rows.weighted_sum(root)
            return inputs.rows.weighted_sum(scores * (length / np.where(useful, lengths, 1)) / scores.sum())

        return make_wrapper(reduce, before)
