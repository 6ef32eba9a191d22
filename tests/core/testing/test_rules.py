"""`check_rule` names the violation of each rule that is broken on purpose."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from fedplat.aggregate import BaseRule, Contribution, Partial, Rule, State, l2_norm, server_optimizer, weighted_mean
from fedplat.model import Blocks, Vector, VectorBlocks
from fedplat.testing import ConformanceError, check_rule

pytestmark = pytest.mark.slow
MEAN = weighted_mean()


class Broken(BaseRule, frozen=True):
    """Options that build a given rule."""

    make: Callable[[], Rule]

    def build(self) -> Rule:
        return self.make()


class OnMean(Broken, frozen=True):
    """The same, for a rule that claims to use only the mean."""

    works_on_mean: ClassVar[bool] = True


def with_mean(**changes: Any) -> Callable[[], Rule]:
    return lambda: dataclasses.replace(weighted_mean(), **changes)


def without_weights(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    return MEAN.fold(partial, update, dataclasses.replace(contribution, weight=1.0))


def by_turns(left: Partial, right: Partial) -> Partial:
    """Half of the right part, as if the left one was older."""
    return MEAN.merge(left, dataclasses.replace(right, total=right.total * np.float32(0.5)))


def whole_vectors(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    vector = np.concatenate(list(update))
    return MEAN.fold(partial, VectorBlocks(vector / np.float32(max(1.0, l2_norm(update)))), contribution)


def in_place(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    for block in update:
        block *= np.float32(contribution.weight)
    return MEAN.fold(partial, update, contribution)


def unchecked(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    scaled = np.concatenate([np.float32(contribution.weight) * block for block in update])
    return dataclasses.replace(
        partial,
        total=partial.total + scaled,
        weight=partial.weight + contribution.weight,
        num_updates=partial.num_updates + 1,
    )


def keeping_state_on_itself() -> Rule:
    last: list[Vector] = []

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        mean, _ = MEAN.apply({}, partial)
        last.append(mean)
        return (mean + np.float32(0.5) * last[0]).astype(np.float32), state

    return dataclasses.replace(weighted_mean(), apply=apply)


CALLS = itertools.count(1)


def random() -> Rule:
    factor = np.float32(1.0 + 1e-3 * next(CALLS))

    def apply(state: State, partial: Partial) -> tuple[Vector, State]:
        return factor * MEAN.apply({}, partial)[0], state

    return dataclasses.replace(weighted_mean(), apply=apply)


def momentum_in_place() -> Rule:
    def init(size: int) -> State:
        return {"velocity": np.zeros(size, np.float32)}

    def update(state: State, delta: Vector) -> tuple[Vector, State]:
        velocity = state["velocity"]
        velocity *= np.float32(0.9)
        velocity += delta
        return velocity.copy(), {"velocity": velocity}

    return server_optimizer(init, update)(weighted_mean())


def by_its_norm(state: State, partial: Partial) -> tuple[Vector, State]:
    mean, _ = MEAN.apply({}, partial)
    return mean / np.float32(np.linalg.norm(mean)), state


def first_counts_most(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    factor = 10.0 if partial.num_updates == 0 else 1.0
    return MEAN.fold(partial, update, dataclasses.replace(contribution, weight=factor * contribution.weight))


def in_double(state: State, partial: Partial) -> tuple[Any, State]:
    return cast(Any, partial.total.astype(np.float64) / partial.weight), state


def dividing_by_zero(state: State, partial: Partial) -> tuple[Vector, State]:
    return partial.total / np.float32(partial.weight), state


def by_number(state: State, partial: Partial) -> tuple[Vector, State]:
    return MEAN.apply({}, partial)[0] * np.float32(partial.num_updates), state


def by_total_weight(state: State, partial: Partial) -> tuple[Vector, State]:
    return MEAN.apply({}, partial)[0] * np.float32(partial.weight), state


def negated(state: State, partial: Partial) -> tuple[Vector, State]:
    return -MEAN.apply({}, partial)[0], state


def adding_before_checking(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    first = 0
    for block in update:
        partial.total[first : first + block.size] += np.float32(contribution.weight) * block
        first += block.size
    if not contribution.weight >= 0 or np.isinf(contribution.weight):
        raise ValueError("impossible weight")
    weight = partial.weight + contribution.weight
    return dataclasses.replace(partial, weight=weight, num_updates=partial.num_updates + 1)


def with_a_sum_for_each(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
    return MEAN.fold(partial, update, contribution).plus(**{contribution.client_id: 1.0})


def losing_sums() -> Rule:
    """Adds up the examples, which `merge` forgets."""

    def fold(partial: Partial, update: Blocks, contribution: Contribution) -> Partial:
        return MEAN.fold(partial, update, contribution).plus(examples=contribution.num_examples)

    def merge(left: Partial, right: Partial) -> Partial:
        return dataclasses.replace(MEAN.merge(left, right), sums=left.sums)

    def publish(partial: Partial) -> Mapping[str, float]:
        return partial.sums

    return dataclasses.replace(MEAN, fold=fold, merge=merge, publish=publish)


def dividing_by_the_weight(state: State, partial: Partial) -> tuple[Vector, State]:
    if partial.num_updates == 0:
        raise ValueError("no update")
    return partial.total / np.float32(partial.weight), state


BROKEN: dict[str, tuple[Callable[[], Rule], str]] = {
    "ignores weights": (with_mean(fold=without_weights), "expected that the weight of an update counts"),
    "depends on the unit of weights": (with_mean(apply=by_total_weight), "all weights times 1024 change the step by"),
    "merges by position": (with_mean(merge=by_turns), "merge() of parts, (1 + 2) + 3, changes the step by"),
    "reads whole vectors": (with_mean(fold=whole_vectors), "expected that it reads the blocks of the update one after"),
    "writes into updates": (with_mean(fold=in_place), "fold() writes into the update that it receives"),
    "accepts any weight": (with_mean(fold=unchecked), "the weight nan gives a step that is not finite"),
    "keeps state on itself": (keeping_state_on_itself, "expected all memory in the vectors that apply() returns"),
    "is random": (random, "expected no randomness and no clock"),
    "changes its state": (momentum_in_place, "apply() writes into the state that it receives; expected new vectors"),
    "uses the whole step": (with_mean(apply=by_its_norm), "or blockwise=False"),
    "depends on the order": (with_mean(fold=first_counts_most), "updates in reverse order change the step by"),
    "has double precision": (with_mean(apply=in_double), "the step is float64["),
    "divides by zero": (with_mean(apply=dividing_by_zero), "without an update returns NaN or infinite entries"),
    "divides by no weight": (with_mean(apply=dividing_by_the_weight), "of updates with the weight 0 returns NaN"),
    "climbs": (with_mean(apply=negated), "if all updates are equal, the step does not go their way"),
    "checks too late": (
        with_mean(fold=adding_before_checking),
        "fold() refuses the weight nan after adding the update",
    ),
    "remembers each client": (with_mean(fold=with_a_sum_for_each), "5 updates have 5 sums, and 10 have 10"),
    "loses sums in merge": (
        losing_sums,
        "after merge(), publish() returns {'examples': 30.0}, and {'examples': 150.0}",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_fails_with_a_clear_sentence(name: str) -> None:
    make, sentence = BROKEN[name]
    with pytest.raises(ConformanceError) as caught:
        check_rule(Broken(make))
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"{caught.value.check}: ")


def test_a_rule_that_uses_more_than_the_mean_must_not_claim_otherwise() -> None:
    make = with_mean(apply=by_number)
    check_rule(Broken(make))
    with pytest.raises(ConformanceError, match="with only the mean of the updates the step differs"):
        check_rule(OnMean(make))
