"""Limits on the numbers that clients report and rules compute with, such as local steps and losses.

A server cannot verify them. One that is far from all others would decide the step of a round, whether it is far too
large or far too small: FedNova divides by a client's own number. So each is compared with the median of its attempt,
which is known only at the end. Until then the updates stay readable, and if a claim exceeds its limits, they are summed
once more; otherwise the sum has the bits that it has without limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low

from fedplat.aggregate.algebra import Contribution, Partial, Rule, State, Wrapper
from fedplat.model import Blocks, Vector

MAX_FACTOR = 10.0
"""How many times the median a claim counts for at most, and the median a claim at least."""
MIN_CLAIMS = 3
"""With fewer claims, none is far from the others: of two, either could be the wrong one."""

Read = Callable[[Mapping[str, float]], float]
"""A function that returns a claim from the metrics of a report."""


def limit_claims(claims: Sequence[float], most: float = MAX_FACTOR) -> list[float]:
    """Return claims that are at most `most` times the lower median, and at least a tenth of it (`MAX_FACTOR`).

    >>> limit_claims([100.0, 100.0, 90.0, 1.0, 1e9])
    [100.0, 100.0, 90.0, 10.0, 1000.0]
    """
    if len(claims) < MIN_CLAIMS:
        return list(claims)
    median = median_low(claims)
    return [min(max(claim, median / MAX_FACTOR), median * most) for claim in claims]


def bound_claims(read: Read, name: str, most: float = MAX_FACTOR) -> Wrapper:
    """Wrap a rule that folds a claim, so that it finds the bounded claim in the metric of this name."""

    def with_claim(contribution: Contribution, claim: float) -> Contribution:
        return dataclasses.replace(contribution, metrics={**contribution.metrics, name: claim})

    def wrap(inner: Rule) -> Rule:
        def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
            folded = inner.fold(partial, update, with_claim(contribution, read(contribution.metrics)))
            return dataclasses.replace(folded, kept=(*partial.kept, (update, contribution)))

        def merge(left: Partial, right: Partial) -> Partial:
            return dataclasses.replace(inner.merge(left, right), kept=left.kept + right.kept)

        def reduce(partial: Partial) -> Partial:
            claims = [read(contribution.metrics) for _, contribution in partial.kept]
            if (bounded := limit_claims(claims, most)) == claims:
                return dataclasses.replace(partial, kept=())
            again = dataclasses.replace(partial, total=inner.start(partial.total.size).total, weight=0.0, num_updates=0)
            again = dataclasses.replace(again, sums={}, kept=())
            for (update, contribution), claim in zip(partial.kept, bounded, strict=True):
                again = inner.fold(again, update, with_claim(contribution, claim))
            return again

        def gather(remembered: Mapping[str, Blocks], partial: Partial) -> Partial:
            return reduce(partial)

        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            return inner.apply(state, reduce(partial))

        return dataclasses.replace(inner, fold=fold, merge=merge, apply=apply, gather=gather)

    return wrap
