"""The server's half of asynchronous training: FedBuff, FedAsync, and updates as differences from other versions.

Source: Nguyen et al. 2022, "Federated Learning with Buffered Asynchronous Aggregation", arXiv 2106.06639, Algorithm 1:
the weighted updates of a full buffer are added up and divided by their number K. K is a constant, so the lower weights
of stale updates shorten the step (Section 5.1: weights s(τ) = 1 / √(1 + τ) of updates that are τ versions old). If the
sum were divided by the sum of the weights instead, stale updates would move the model as far as fresh ones.

The job's mode sets the weight of every update, so the job must have `weighting = "uniform"`.

Source: Xie et al. 2019, "Asynchronous Federated Optimization", arXiv 1903.03934, Algorithm 1: on every report x ← (1 -
m) x + m x_client, with m = mixing · s(t - τ) for a client that started from version τ. So the step is m (x_client - x),
with x_client = x_τ + update: unlike FedBuff's step, it partly undoes the steps committed since version τ.

s is in the weights, set by the job's mode (`weighting = "uniform"`); the functions of the paper's Section 5.2 are
"constant", "polynomial" and "hinge". The paper's algorithm has `selection.goal = 1`; a larger buffer uses the mean of
the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import BaseRule, Partial, Rule, State
from fedplat.aggregate.mean import weighted_mean
from fedplat.aggregate.server_optimizers import FedAvg, server_sgd
from fedplat.model import BLOCK, Blocks, Schema, Segment, Values, Vector


class FedBuff(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedbuff"):
    """Options of FedBuff. Raises `ValueError` for a value out of range."""

    learning_rate: ranges.Rate = 1.0
    """η_g, the factor of the sum divided by K."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        return server_sgd(FedAvg(self.learning_rate))(divide_by_number(weighted_mean()))


def divide_by_number(inner: Rule) -> Rule:
    """Turn a weighted mean into the weighted sum divided by the number of updates."""

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        mean, state = inner.apply(state, partial)
        return mean * (partial.weight / partial.num_updates), state

    return dataclasses.replace(inner, apply=apply, unit_weights=True)


class FedAsync(BaseRule, frozen=True, forbid_unknown_fields=True, tag_field="rule", tag="fedasync"):
    """Options of FedAsync. Raises `ValueError` for a value out of range."""

    mixing: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.6
    """Alpha, the fraction of the distance that the model moves towards the model of a client that is not stale."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def build(self) -> Rule:
        """Return the rule with these options."""
        rule = server_sgd(FedAvg(self.mixing))(divide_by_number(weighted_mean()))
        return dataclasses.replace(rule, from_latest=True)


def rebase(update: Values, origin: Values, base: Values) -> Values:
    """Return the difference from `base` to the model that a client trained from `origin`: update + (origin - base).

    A rule that is `from_latest` folds it if `base` was committed after the client started. It is computed in blocks,
    each time that it is read. All three have the same schema; entries that are not floating-point are the update's.
    """
    return _Rebased(update, origin, base)


class _Rebased:
    def __init__(self, update: Values, origin: Values, base: Values) -> None:
        self._update, self._origin, self._base = update, origin, base

    @property
    def schema(self) -> Schema:
        return self._update.schema

    def to_blocks(self, columns: range | None = None) -> Blocks:
        return _RebasedBlocks(*(values.to_blocks(columns) for values in (self._update, self._origin, self._base)))

    def read_carried(self, run: Segment) -> Iterator[npt.NDArray[Any]]:
        return self._update.read_carried(run)


class _RebasedBlocks:
    def __init__(self, update: Blocks, origin: Blocks, base: Blocks) -> None:
        self._parts = update, origin, base

    @property
    def size(self) -> int:
        return self._parts[0].size

    def __iter__(self) -> Iterator[Vector]:
        scratch = np.empty(min(BLOCK, self.size), np.float32)
        for update, origin, base in zip(*self._parts, strict=True):
            difference = np.subtract(origin, base, out=scratch[: update.size])
            yield np.add(difference, update, out=difference)
