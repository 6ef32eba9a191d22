"""The weighted mean of the updates, streamed: the reduction of every rule here; and the mean of running statistics.

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
arXiv 1602.05629, Algorithm 1, the sum over clients of n_k / n times the update.

Running statistics are measurements of the clients' data and no weights, so there is no gradient that a server optimizer
could follow. A step of FedAdam has a size of its own, and a momentum continues in the old direction: the variance
becomes negative, and its root NaN. Reddi et al. 2021 (arXiv 2003.00295) avoid BatchNorm for this reason; here the
statistics move by the mean of the clients' updates, whatever the rule does with the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from fedplat.aggregate.algebra import MEAN_WEIGHT, Contribution, Partial, Rule, State
from fedplat.model import WINDOW, Blocks, Schema, Vector, windows
from fedplat.model.turns import Turn

MAX_WEIGHT = 1e30
"""Largest weight: larger ones would leave the range of the float32 sums."""


def weighted_mean() -> Rule:
    """Return the rule with the step: the sum of weight times update, divided by the sum of the weights.

    Updates have [size] entries; a weight is 0 to `MAX_WEIGHT`, in any unit (such as examples). The sums are float32, so
    the order of the updates changes the result only by rounding, and the same order results in the same bits. `fold`,
    `merge` and `apply` raise `ValueError` for an update of another size, for a weight out of range, and if nothing was
    folded or every weight was 0.
    """
    return Rule(init=_init, start=_start, fold=_fold, merge=_merge, apply=_apply)


def restrict_to_mean(rule: Rule) -> Rule:
    """Return a rule that receives only the mean of the updates, as if it was the only update of each attempt.

    The result for rules that work on the mean has the same bits. The rule can neither read a single update, nor sums
    over the updates, such as those of private jobs before their noise.
    """

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        mean, _ = _apply({}, partial)
        only = Partial(mean, weight=1.0, num_updates=1, first=partial.first, reduce_shards=partial.reduce_shards)
        return rule.apply(state, only)

    return dataclasses.replace(weighted_mean(), init=rule.init, apply=apply, blockwise=rule.blockwise)


def _init(size: int) -> State:
    return {}


def _start(size: int) -> Partial:
    return Partial(np.zeros(size, np.float32))


def _fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    total, weight = partial.total, contribution.weight
    _check_fits(total, update.size)
    if not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"the weight is {weight}; expected a number from 0 to {MAX_WEIGHT:g}")
    scratch = np.empty(min(WINDOW, total.size), np.float32)
    start = 0
    for values in windows(update):
        if partial.device is not None:
            partial.device.add(start, values, weight)
        else:
            part = total[start : start + values.size]
            # Multiplying by 1 would not change the bits; skipping it saves a third of the time if all weights are 1.
            scaled = values if weight == 1 else np.multiply(values, weight, out=scratch[: values.size])
            np.add(part, scaled, out=part)
        start += values.size
    assert start == total.size
    return dataclasses.replace(
        partial, total=total, weight=partial.weight + weight, num_updates=partial.num_updates + 1
    )


def _merge(left: Partial, right: Partial) -> Partial:
    _check_fits(left.total, right.total.size)
    np.add(left.total, right.total, out=left.total)
    merged = left.plus(**right.sums)
    return dataclasses.replace(
        merged, weight=left.weight + right.weight, num_updates=left.num_updates + right.num_updates
    )


def _apply(state: State, partial: Partial) -> tuple[Vector, State]:
    if partial.num_updates == 0:
        raise ValueError("no update was folded; a mean needs at least one")
    if partial.weight <= 0:
        raise ValueError(f"the weights of {partial.num_updates} updates add up to 0; a mean needs one above 0")
    return partial.total / np.float32(partial.weight), state


def _check_fits(total: Vector, size: int) -> None:
    if size != total.size:
        raise ValueError(f"the update has {size} entries; expected {total.size}")


def average_statistics(inner: Rule) -> Rule:
    """Replace a rule's step by the mean of the updates for the entries of `Partial.statistics`.

    With `unit_weights`, stale updates count for less, as in the step. A rule whose step is a part of the way to the
    clients' models (FedAsync), or what the clients have given away (EASGD), keeps it.
    """
    unit = float(inner.unit_weights)
    keeps_step = inner.unit_weights and (inner.from_latest or bool(inner.requirements.algorithm))

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        step, after = inner.apply(state, partial)
        own = _cut(partial.statistics, partial)
        if keeps_step or not own:
            return step, after
        step = step.copy()  # it may be part of the state, such as a momentum
        weight = np.float32(max(partial.sums.get(MEAN_WEIGHT, partial.weight), partial.num_updates * unit))
        for part in own:
            step[part] = partial.total[part] / weight
        return step, after

    return dataclasses.replace(inner, apply=apply)


def hold_resting(turn: Turn) -> Callable[[Rule], Rule]:
    """Return a wrapper by which the tensors that rest in a round keep their values, and the state of the rule for them.

    Clients send no update of them. Without it a momentum, or the noise of a private job, would move them.
    """

    def wrap(inner: Rule) -> Rule:
        def apply(state: State, partial: Partial) -> tuple[Vector, State]:
            step, after = inner.apply(state, partial)
            held = [] if partial.schema is None else _cut(turn.columns(partial.schema), partial)
            if not held:
                return step, after
            step, after = step.copy(), {name: vector.copy() for name, vector in after.items()}
            for part in held:
                step[part] = 0.0
                for name, vector in after.items():
                    vector[part] = state[name][part]
            return step, after

        return dataclasses.replace(inner, apply=apply)

    return wrap if turn.groups else lambda inner: inner


def _cut(columns: Sequence[range], partial: Partial) -> list[slice]:
    """Return the parts of columns of the model that are in the total of a partial result, by their places there."""
    size = partial.total.size
    ends = ((max(each.start - partial.first, 0), min(each.stop - partial.first, size)) for each in columns)
    return [slice(start, stop) for start, stop in ends if start < stop]


def describe_statistics(schema: Schema) -> str:
    """Return why a private job cannot have a model of this schema, or ""."""
    if not schema.statistics:
        return ""
    return (
        f"the model has running statistics ({schema.statistics[0].name!r}), which noise would make useless, and a "
        "variance negative; a private job needs another normalisation, such as GroupNorm, or "
        "BatchNorm(track_running_stats=False), or the clients keep theirs (personal)"
    )
