"""Running statistics, such as those of BatchNorm: averaged under every rule.

They are measurements of the clients' data and no weights, so there is no gradient that a server optimizer could follow.
A step of FedAdam has a size of its own, and a momentum continues in the old direction: the variance becomes negative,
and its root NaN. Reddi et al. 2021 (arXiv 2003.00295) avoid BatchNorm for this reason; here the statistics move by the
mean of the clients' updates, whatever the rule does with the weights.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fedplat.aggregate.algebra import MEAN_WEIGHT, Partial, Rule, State
from fedplat.model import Schema, Vector


def average_statistics(inner: Rule) -> Rule:
    """Replace a rule's step by the mean of the updates for the entries of `Partial.statistics`.

    With `unit_weights`, stale updates count for less, as in the step. A rule whose step is a part of the way to the
    clients' models (FedAsync), or what the clients have given away (EASGD), keeps it.
    """
    unit = float(inner.unit_weights)
    keeps_step = inner.unit_weights and (inner.from_latest or bool(inner.requirements.algorithm))

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        step, after = inner.apply(state, partial)
        size = partial.total.size
        own = [
            range(max(each.start - partial.first, 0), min(each.stop - partial.first, size))
            for each in partial.statistics
        ]
        if keeps_step or not any(own):
            return step, after
        step = step.copy()  # it may be part of the state, such as a momentum
        weight = np.float32(max(partial.sums.get(MEAN_WEIGHT, partial.weight), partial.num_updates * unit))
        for part in filter(None, own):
            step[part.start : part.stop] = partial.total[part.start : part.stop] / weight
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
