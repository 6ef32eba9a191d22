"""The inputs of a robust rule (the updates of an attempt as rows), and pre-aggregators, which mix them.

Almost every robust rule uses only distances, or only single columns. Distances follow from the inner products of the
rows, which take one pass over the updates; the result is a weighted sum of rows, one more pass. The inner products of
mixed rows (the means of buckets, for instance) are M G Mᵀ, which takes no pass. So each rule of this package reads each
update at most twice, with any pre-aggregators, in memory of a few windows.

Source: Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022 (arXiv
2006.09365), Algorithm 1: means of s updates differ less than the updates of clients with different data, and every
byzantine update still affects only one mean. The last group may be smaller; its mean is over the updates that it has.

Source: Allouah et al. 2023, "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", AISTATS 2023
(arXiv 2302.01772), Algorithm 2. An update is its own nearest neighbour; at equal distances the first one counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fedplat.aggregate import algebra as ranges
from fedplat.aggregate.algebra import Contribution, Partial, Rule, Wrapper
from fedplat.model import Blocks, Vector
from fedplat.model.blocks import Columns, Matrix, ShardReduce, each_column, gram, single_shard, weighted_sum


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows that are weighted sums of vectors, with weights `mixing`, [rows, vectors].

    `products()` returns the inner products of the vectors.
    """

    vectors: Sequence[Blocks]
    mixing: Matrix
    products: Callable[[], Matrix]

    @classmethod
    def of(
        cls, updates: Sequence[Blocks], extra: Sequence[Blocks] = (), reduce_shards: ShardReduce = single_shard
    ) -> Rows:
        """Return one row for each update. The `extra` vectors are not rows; see `with_vector`.

        If all vectors are a shard's parts, `reduce_shards` adds the inner products of the other shards.
        """
        vectors = [*updates, *extra]
        return cls(vectors, np.eye(len(updates), len(vectors)), cache(lambda: gram(vectors, reduce_shards)))

    def __len__(self) -> int:
        return len(self.mixing)

    def combine(self, factors: Matrix) -> Rows:
        """Return weighted sums of these rows; `factors` has shape [new rows, rows]."""
        return dataclasses.replace(self, mixing=_product(factors, self.mixing))

    def select(self, indices: Sequence[int]) -> Rows:
        """Return some of these rows."""
        return dataclasses.replace(self, mixing=self.mixing[list(indices)])

    def with_vector(self, index: int) -> Rows:
        """Return these rows followed by one of the vectors as a row."""
        return dataclasses.replace(self, mixing=np.vstack([self.mixing, np.eye(len(self.vectors))[index]]))

    @cached_property
    def gram(self) -> Matrix:
        """The inner products of all pairs of rows."""
        return _product(_product(self.mixing, self.products()), self.mixing.T)

    @cached_property
    def squared_distances(self) -> Matrix:
        """The squared L2 distances of all pairs of rows."""
        norms = np.diagonal(self.gram)
        squared = np.maximum(norms[:, None] + norms[None, :] - 2 * self.gram, 0)
        np.fill_diagonal(squared, 0)
        return squared

    def distances_to(self, coefficients: Matrix) -> Matrix:
        """Return the L2 distance of each row to a weighted sum of the rows."""
        products = (self.gram * coefficients).sum(axis=1)
        squared = np.diagonal(self.gram) - 2 * products + (products * coefficients).sum()
        return np.sqrt(np.maximum(squared, 0))

    def weighted_sum(self, coefficients: Matrix) -> Vector:
        """Return the sum of coefficient times row."""
        return weighted_sum(self.vectors, (coefficients[:, None] * self.mixing).sum(axis=0))

    def each_column(self, combine: Callable[[Columns], Vector]) -> Vector:
        """Apply `combine` to the columns; see `fedplat.model.blocks.each_column`."""
        [used] = np.nonzero(self.mixing.any(axis=0))
        mixing = self.mixing[:, used]
        if ((mixing == 1).sum(axis=1) == 1).all() and (mixing != 0).sum() == len(mixing):  # rows as they are
            return each_column([self.vectors[index] for index in self.mixing.argmax(axis=1).tolist()], combine)
        return each_column([self.vectors[index] for index in used.tolist()], combine, mixing)


def _product(left: Matrix, right: Matrix) -> Matrix:
    # Not with BLAS: its bits depend on the number of threads.
    return np.einsum("ij,jk->ik", left, right)


@dataclasses.dataclass(frozen=True)
class RobustInputs:
    """The inputs of a robust rule: a row for each update, unless they were mixed, and the contributions."""

    rows: Rows
    contributions: Sequence[Contribution]


Mix = Callable[[Rows], Rows]
"""A pre-aggregator: it returns other rows in place of the rows."""

Reduce = Callable[[RobustInputs], Vector]
"""A robust rule: it reduces the updates of an attempt to one vector."""


def keep_updates(inner: Rule) -> Rule:
    """Return a rule that folds nothing: its partial results keep the updates, for a `gather` that is to be added."""

    def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
        if update.size != partial.total.size:
            raise ValueError(f"the update has {update.size} entries; expected {partial.total.size}")
        return dataclasses.replace(
            partial,
            weight=partial.weight + contribution.weight,
            num_updates=partial.num_updates + 1,
            kept=(*partial.kept, (update, contribution)),
        )

    def merge(left: Partial, right: Partial) -> Partial:
        return dataclasses.replace(inner.merge(left, right), kept=left.kept + right.kept)

    return dataclasses.replace(inner, fold=fold, merge=merge)


def make_wrapper(reduce: Reduce, before: Mix, extra: Sequence[str] = ()) -> Wrapper:
    """Make a wrapper that replaces the updates of a partial result by the robust result, as a single update.

    The wrapped rule's mean is then the robust result, and everything that follows is done with it; the updates' weights
    have no effect. `before` mixes the rows first; `extra` names the state vectors that are passed along with the
    updates.
    """

    def wrap(inner: Rule) -> Rule:
        def gather(state: Mapping[str, Blocks], partial: Partial) -> Partial:
            updates = [update for update, _ in partial.kept]
            rows = Rows.of(updates, [state[name] for name in extra], partial.reduce_shards)
            total = reduce(RobustInputs(before(rows), [contribution for _, contribution in partial.kept]))
            return dataclasses.replace(partial, total=total, weight=1.0, kept=())

        return dataclasses.replace(keep_updates(inner), gather=gather)

    return wrap


class Bucketing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="bucketing"):
    """Options of bucketing. Raises `ValueError` for a value out of range."""

    size: Annotated[int, Meta(ge=1, le=1000)] = 2
    """s, updates in a bucket; the paper has 2."""

    def __post_init__(self) -> None:
        ranges.check_ranges(self)

    def rows_of(self, num_updates: int) -> int:
        """Return the number of rows that result from `num_updates`."""
        return -(-num_updates // self.size)

    def build(self, byzantine: int, seed: int) -> Mix:
        """Return the pre-aggregator; the seed and the order of the updates determine the buckets."""

        def mix(rows: Rows) -> Rows:
            order = np.random.default_rng(seed).permutation(len(rows))
            factors = np.zeros((self.rows_of(len(rows)), len(rows)))
            for number, bucket in enumerate(factors):
                members = order[number * self.size : (number + 1) * self.size]
                bucket[members] = 1 / len(members)
            return rows.combine(factors)

        return mix


class NearestNeighbours(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", tag="nearest"):
    """Nearest-neighbour mixing, which has no options."""

    def rows_of(self, num_updates: int) -> int:
        """Return the number of rows that result from `num_updates`."""
        return num_updates

    def build(self, byzantine: int, seed: int) -> Mix:
        """Return the pre-aggregator."""

        def mix(rows: Rows) -> Rows:
            count = len(rows) - byzantine
            nearest = np.argsort(rows.squared_distances, axis=1, kind="stable")[:, :count]
            factors = np.zeros((len(rows), len(rows)))
            np.put_along_axis(factors, nearest, 1 / count, axis=1)
            return rows.combine(factors)

        return mix
