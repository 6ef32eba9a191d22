"""Running statistics, such as those of BatchNorm: averaged under every rule.

They are measurements of the clients' data and no weights, so there is no gradient that a server optimizer could follow.
A step of FedAdam has a size of its own, and a momentum continues in the old direction: the variance becomes negative,
and its root NaN. Reddi et al. 2021 (arXiv 2003.00295) avoid BatchNorm for this reason; here the statistics move by the
mean of the clients' updates, whatever the rule does with the weights.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fedplat.aggregate.algebra import MEAN_WEIGHT, Partial, Rule, State, Statistics
from fedplat.model import WINDOW, FlatModel, Schema, Vector
from fedplat.model.values import FloatingBlocks


def read_statistics(base: FlatModel) -> tuple[Statistics, ...]:
    """Return the running statistics of a base version; a step may not make a variance negative."""
    found: list[Statistics] = []
    for tensor in base.schema.statistics:
        columns = tensor.columns
        if tensor.is_spread:
            values = FloatingBlocks(base.schema, lambda: base.reader(8 * WINDOW), columns)
            found.append(Statistics(columns.start, -np.concatenate([block.copy() for block in values])))
        else:
            found.append(Statistics(columns.start, np.full(len(columns), -np.inf, np.float32)))
    return tuple(found)


def average_statistics(inner: Rule) -> Rule:
    """Replace a rule's step by the mean of the updates for the entries of `Partial.statistics`.

    The rules of asynchronous jobs (`unit_weights`) move a fraction towards the clients' models, and keep their step.
    """

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        step, after = inner.apply(state, partial)
        end = partial.first + partial.total.size
        own = [
            each for each in partial.statistics if each.first < end and each.first + len(each.lowest) > partial.first
        ]
        if not own:
            return step, after
        step = step.copy()  # it may be part of the state, such as a momentum
        weight = np.float32(partial.sums.get(MEAN_WEIGHT, partial.weight))
        for each in own:
            start, stop = max(each.first, partial.first), min(each.first + len(each.lowest), end)
            part = slice(start - partial.first, stop - partial.first)
            moved = step[part] if inner.unit_weights else partial.total[part] / weight
            np.maximum(moved, each.lowest[start - each.first : stop - each.first], out=step[part])
        return step, after

    return dataclasses.replace(inner, apply=apply)


def describe_statistics(schema: Schema) -> str:
    """Return why a private job cannot have a model of this schema, or ""."""
    if not schema.statistics:
        return ""
    return (
        f"the model has running statistics ({schema.statistics[0].name!r}), which noise would make useless, and a "
        "variance negative; a private job needs another normalisation, such as GroupNorm, or "
        "BatchNorm(track_running_stats=False), or the clients keep theirs (personal)"
    )
