"""What a robust rule works on: the updates of an attempt as rows, and how its result becomes a partial one.

Almost every robust rule looks at distances only, or at single columns. Distances follow from the inner products of the
rows, one pass over the updates; what is chosen or weighted by them is a sum of rows, one more pass. And a mixture of
rows (a bucket's mean, say) has the inner products M G Mᵀ, which cost no pass at all. So each rule of this package reads
each update at most twice, whatever is put before it, and with the memory of a few windows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property

import numpy as np

from fedplat.aggregate.algebra import Contribution, Partial, Rule, Wrapper
from fedplat.model import Blocks, Vector
from fedplat.model.rows import Columns, Matrix, each_column, gram, weighted_sum
from fedplat.model.shards import ShardReduce, single_shard


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows that are weighted sums of vectors, by `mixing`, [rows, vectors]; `products()` are the vectors' own."""

    vectors: Sequence[Blocks]
    mixing: Matrix
    products: Callable[[], Matrix]

    @classmethod
    def of(cls, updates: Sequence[Blocks], beside: Sequence[Blocks] = (), across: ShardReduce = single_shard) -> Rows:
        """One row for each update. The vectors `beside` them are no rows; see `with_vector`.

        Where all of them are a shard's parts of vectors, `across` brings in the other shards' inner products.
        """
        vectors = [*updates, *beside]
        return cls(vectors, np.eye(len(updates), len(vectors)), cache(lambda: gram(vectors, across)))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.mixing)

    def combine(self, factors: Matrix) -> Rows:
        """Weighted sums of these rows, [new rows, rows]."""
        return dataclasses.replace(self, mixing=_product(factors, self.mixing))

    def select(self, indices: Sequence[int]) -> Rows:
        """Some of these rows."""
        return dataclasses.replace(self, mixing=self.mixing[list(indices)])

    def with_vector(self, index: int) -> Rows:
        """These rows, and behind them one of the vectors as a row of its own."""
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
        """The L2 distance of each row to a weighted sum of the rows."""
        products = (self.gram * coefficients).sum(axis=1)
        squared = np.diagonal(self.gram) - 2 * products + (products * coefficients).sum()
        return np.sqrt(np.maximum(squared, 0))

    def weighted_sum(self, coefficients: Matrix) -> Vector:
        """The sum of coefficient times row."""
        return weighted_sum(self.vectors, (coefficients[:, None] * self.mixing).sum(axis=0))

    def each_column(self, combine: Callable[[Columns], Vector]) -> Vector:
        """What `combine` makes of each column; see `fedplat.model.rows`."""
        [used] = np.nonzero(self.mixing.any(axis=0))
        mixing = self.mixing[:, used]
        if ((mixing == 1).sum(axis=1) == 1).all() and (mixing != 0).sum() == len(mixing):  # rows as they are
            return each_column([self.vectors[index] for index in self.mixing.argmax(axis=1).tolist()], combine)
        return each_column([self.vectors[index] for index in used.tolist()], combine, mixing)


def _product(left: Matrix, right: Matrix) -> Matrix:
    # Not by BLAS, whose bits depend on its number of threads.
    return np.einsum("ij,jk->ik", left, right)


@dataclasses.dataclass(frozen=True)
class RobustInputs:
    """What a robust rule is given: a row for each update, unless they were mixed, and what is known of the updates."""

    rows: Rows
    contributions: Sequence[Contribution]


Mix = Callable[[Rows], Rows]
"""A pre-aggregator: other rows instead of those that there are."""

Reduce = Callable[[RobustInputs], Vector]
"""A robust rule: what the cohort's updates come to."""


def gathering(reduce: Reduce, before: Mix, beside: Sequence[str] = ()) -> Wrapper:
    """Makes the partial result of a rule the robust result alone: the wrapped rule's mean is that of one update.

    So whatever is done with a mean of updates is done with it; weights do not count. `before` mixes the rows first;
    the remembered vectors named by `beside` are put beside the updates.
    """

    def wrap(inner: Rule) -> Rule:
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

        def gather(state: Mapping[str, Blocks], partial: Partial) -> Partial:
            updates = [update for update, _ in partial.kept]
            rows = Rows.of(updates, [state[name] for name in beside], partial.reduce_shards)
            total = reduce(RobustInputs(before(rows), [contribution for _, contribution in partial.kept]))
            return dataclasses.replace(partial, total=total, weight=1.0, kept=())

        return dataclasses.replace(inner, fold=fold, merge=merge, gather=gather)

    return wrap
