"""The checks of robust rules and pre-aggregators name the violation of each that is broken on purpose."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from fedplat.aggregate import Wrapper
from fedplat.aggregate.robust import PreAggregator, RobustRule
from fedplat.aggregate.robust.inputs import Mix, RobustInputs, Rows, make_wrapper
from fedplat.aggregate.robust.medians import median_of_columns
from fedplat.model import Vector
from fedplat.testing import ConformanceError, check_pre_aggregator, check_robust_rule

CALLS = itertools.count(1)


class Broken(Struct, frozen=True):
    """The median, with a defect."""

    reduce: Callable[[RobustInputs], Any]
    fewest_of: Callable[[int], int] = lambda byzantine: 2 * byzantine + 1
    ignores_before: bool = False

    def fewest(self, byzantine: int) -> int:
        return self.fewest_of(byzantine)

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        return make_wrapper(self.reduce, (lambda rows: rows) if self.ignores_before else before)


def median(inputs: RobustInputs) -> Vector:
    return inputs.rows.each_column(median_of_columns)


def mean(inputs: RobustInputs) -> Vector:
    return inputs.rows.each_column(lambda columns: columns.mean(axis=0, dtype=np.float32))


def almost_all(inputs: RobustInputs) -> Vector:
    """The mean without the largest and the smallest entry: two may be arbitrary, so one is too few."""
    return inputs.rows.each_column(lambda columns: np.sort(columns, axis=0)[1:-1].mean(axis=0, dtype=np.float32))


def first(inputs: RobustInputs) -> Vector:
    return np.concatenate([block.copy() for block in inputs.rows.vectors[0]] or [np.empty(0, np.float32)])


def random(inputs: RobustInputs) -> Vector:
    return median(inputs) + np.float32(1e-6 * next(CALLS))


def in_double(inputs: RobustInputs) -> Any:
    return median(inputs).astype(np.float64)


def in_place(inputs: RobustInputs) -> Vector:
    for block in inputs.rows.vectors[0]:
        block *= np.float32(2.0)
    return median(inputs)


def by_norm(inputs: RobustInputs) -> Vector:
    """A part of the vector is scaled by its own norm."""
    found = median(inputs)
    return found / np.float32(max(np.linalg.norm(found), 1e-9)) if found.size else found


def nothing(inputs: RobustInputs) -> Vector:
    return np.zeros_like(median(inputs))


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (Broken(mean), "of 13 updates move the result by"),
        (Broken(almost_all), "expected a bound that does not depend on their size"),
        (Broken(first), "updates in another order change the result by"),
        (Broken(nothing), "if all updates are equal, the result does not point their way"),
        (Broken(random), "expected no randomness and no memory"),
        (Broken(in_double), "the result is float64[1000]; expected float32[1000]"),
        (Broken(in_place), "the rule writes into updates"),
        (Broken(by_norm), "two parts of the vectors, computed by themselves, have other bits"),
        (Broken(median, lambda byzantine: byzantine), "fewest() of 0 to 5 returns [0, 1, 2, 3, 4, 5]; expected more"),
        (Broken(median, lambda byzantine: 9 - byzantine), "expected more than the arbitrary updates, and no smaller"),
        (Broken(median, ignores_before=True), "before() is called 0 times; expected once"),
    ],
)
def test_a_broken_robust_rule_fails_with_a_clear_sentence(rule: RobustRule, sentence: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_robust_rule(rule)
    assert sentence in str(caught.value)


def test_a_rule_that_is_not_broken() -> None:
    check_robust_rule(Broken(median))


class Plain(Struct, frozen=True):
    """A wrapper that gathers nothing."""

    def fewest(self, byzantine: int) -> int:
        return byzantine + 1

    def build(self, byzantine: int, before: Mix) -> Wrapper:
        return lambda inner: dataclasses.replace(inner, gather=None)


def test_a_rule_that_does_not_gather() -> None:
    with pytest.raises(ConformanceError, match=r"rules without gather\(\); expected that of"):
        check_robust_rule(Plain())


class Mixes(Struct, frozen=True):
    """A pre-aggregator of a function of the number of updates that returns weights."""

    weights: Callable[[int], Any]
    rows: Callable[[int], int] = lambda number: number

    def rows_of(self, num_updates: int) -> int:
        return self.rows(num_updates)

    def build(self, byzantine: int, seed: int) -> Mix:
        def mix(rows: Rows) -> Rows:
            return rows.combine(np.asarray(self.weights(len(rows)), np.float64))

        return mix


@pytest.mark.parametrize(
    ("mixing", "sentence"),
    [
        (Mixes(lambda number: np.eye(number)[:2]), "3 updates give 2 rows; expected rows_of(3), 3"),
        (Mixes(np.eye, lambda number: number + 1), "rows_of(3) returns 4; expected a number from 1 to 3"),
        (Mixes(lambda number: 2 * np.eye(number)), "the weights of the updates in a row add up to 2; expected 1"),
        (
            Mixes(lambda number: np.eye(number)[np.random.default_rng(next(CALLS)).permutation(number)]),
            "two mixtures with the same seed differ; expected no other randomness and no memory",
        ),
    ],
)
def test_a_broken_pre_aggregator_fails_with_a_clear_sentence(mixing: PreAggregator, sentence: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_pre_aggregator(mixing)
    assert sentence in str(caught.value)


def test_a_pre_aggregator_that_is_not_broken() -> None:
    check_pre_aggregator(Mixes(np.eye))
