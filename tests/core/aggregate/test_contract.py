"""One suite for all aggregation rules: add an algorithm by adding a row to `CASES`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from fedplat.aggregate import (
    RULES,
    Contribution,
    Partial,
    Rule,
    RuleOptions,
    describe_metrics_problem,
)
from fedplat.config.plugins import BUILTIN
from fedplat.model import Vector, VectorBlocks
from fedplat.testing import check_rule
from support.rule_cases import CASES, SIZE, Updates, make_options

NUM_ROUNDS = 5


every_rule = pytest.mark.parametrize("name", CASES)


def make_rule(name: str) -> Rule:
    return make_options(name).build()


def make_updates(round_number: int = 0, num_updates: int = 4) -> Updates:
    rng = np.random.default_rng(round_number)
    updates = list[tuple[Vector, Contribution]]()
    for number, weight in enumerate([3.0, 10.0, 1.5, 7.0, 2.0, 31.0][:num_updates]):
        metrics = {"local_steps": 5.0 + 3 * number, "loss_before": 2.3 / (number + 1)}
        update = rng.normal(0.02, 0.1, SIZE).astype(np.float32)
        updates.append((update, Contribution(weight, 10 * weight, metrics, number % 3)))
    return updates


def fold_all(rule: Rule, updates: Updates) -> Partial:
    partial = rule.start(SIZE)
    for update, contribution in updates:
        partial = rule.fold(partial, VectorBlocks(update), contribution)
    return partial


def run(rule: Rule, rounds: list[Updates]) -> list[Vector]:
    state, steps = rule.init(SIZE), list[Vector]()
    for updates in rounds:
        step, state = rule.apply(state, fold_all(rule, updates))
        steps.append(step)
    return steps


def assert_close(actual: Sequence[npt.NDArray[Any]], expected: Sequence[npt.NDArray[Any]], tolerance: float) -> None:
    assert len(actual) == len(expected) > 0
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance * np.abs(right).max())


def rounds_of_updates() -> list[Updates]:
    return [make_updates(number) for number in range(NUM_ROUNDS)]


def test_every_rule_has_a_row():
    assert CASES.keys() == RULES.keys()


def test_the_union_and_the_table_agree():
    for name, record in RULES.items():
        assert type(options := make_options(name)) is record
        assert msgspec.to_builtins(options)["rule"] == name


@every_rule
def test_steps_equal_the_papers_formula(name: str):
    rounds = rounds_of_updates()
    expected = list(CASES[name].reference(make_options(name), rounds))
    assert_close(run(make_rule(name), rounds), expected, 2e-6)


@every_rule
def test_the_public_checks(name: str):
    check_rule(make_options(name), {"local_steps": 5.0, "loss_before": 2.3})


@every_rule
def test_merging_with_an_empty_partial_changes_nothing(name: str):
    rule, updates = make_rule(name), make_updates()
    expected = rule.apply(rule.init(SIZE), fold_all(rule, updates))[0]
    for merged in (
        rule.merge(rule.start(SIZE), fold_all(rule, updates)),
        rule.merge(fold_all(rule, updates), rule.start(SIZE)),
    ):
        assert rule.apply(rule.init(SIZE), merged)[0].tobytes() == expected.tobytes()


@every_rule
@pytest.mark.parametrize(("factor", "tolerance"), [(1024.0, 0.0), (0.001, 2e-6), (1e6, 2e-6)])
def test_the_unit_of_the_weights_does_not_matter(name: str, factor: float, tolerance: float):
    rounds = rounds_of_updates()
    scaled = [
        [(update, dataclasses.replace(each, weight=factor * each.weight)) for update, each in updates]
        for updates in rounds
    ]
    if make_rule(name).unit_weights:  # twice the weight is twice the step
        rounds = [[(np.float32(factor) * update, each) for update, each in updates] for updates in rounds]
    assert_close(run(make_rule(name), scaled), run(make_rule(name), rounds), tolerance)


@every_rule
def test_a_mean_of_nothing_is_refused(name: str):
    rule, [(update, contribution), *_] = make_rule(name), make_updates()
    nothing = dataclasses.replace(contribution, weight=0.0)
    with pytest.raises(ValueError, match="no update was folded"):
        rule.apply(rule.init(SIZE), rule.start(SIZE))
    with pytest.raises(ValueError, match="add up to 0"):
        rule.apply(rule.init(SIZE), rule.fold(rule.start(SIZE), VectorBlocks(update), nothing))


@every_rule
def test_no_change_is_no_step(name: str):
    rule, [(_, contribution), *_] = make_rule(name), make_updates()
    partial = rule.fold(rule.start(3), VectorBlocks(np.zeros(3, np.float32)), contribution)
    step, _ = rule.apply(rule.init(3), partial)
    assert step.tolist() == [0, 0, 0]


@every_rule
def test_a_model_without_floating_entries_has_an_empty_step(name: str):
    rule, [(_, contribution), *_] = make_rule(name), make_updates()
    partial = rule.fold(rule.start(0), VectorBlocks(np.zeros(0, np.float32)), contribution)
    step, _ = rule.apply(rule.init(0), partial)
    assert step.shape == (0,)


@every_rule
def test_options_survive_a_job_file(name: str):
    options = make_options(name)
    assert BUILTIN.decode(RuleOptions, msgspec.to_builtins(options)) == options
    assert {field: getattr(options, field) for field in CASES[name].options} == CASES[name].options
    assert (
        msgspec.structs.asdict(cast(msgspec.Struct, options)).keys() == set(CASES[name].options) == set(CASES[name].bad)
    )


@every_rule
def test_options_refuse_values_out_of_range_and_unknown_keys(name: str):
    for field, values in CASES[name].bad.items():
        for value in values:
            with pytest.raises(msgspec.ValidationError, match=f"\\$.{field}"):
                BUILTIN.decode(RuleOptions, {"rule": name, **CASES[name].options, field: value})
            with pytest.raises(ValueError, match=f"^{field} is"):
                RULES[name](**{**CASES[name].options, field: value})
    with pytest.raises(msgspec.ValidationError, match="learning_rat`"):
        BUILTIN.decode(RuleOptions, {"rule": name, "learning_rat": 1.0})


@every_rule
def test_options_are_frozen(name: str):
    with pytest.raises(AttributeError):
        make_options(name).learning_rate = 1.0  # type: ignore[misc]


@every_rule
def test_reports_hold_what_the_rule_needs(name: str):
    rule, [(_, contribution), *_] = make_rule(name), make_updates()
    assert describe_metrics_problem(rule, contribution.metrics) == ""
    for metric in rule.metrics:
        without = {key: value for key, value in contribution.metrics.items() if key != metric}
        assert f"lacks the metric {metric}," in describe_metrics_problem(rule, without)
        for value in (-1.0, 1e31, float("nan")):
            assert f"{metric} is {value};" in describe_metrics_problem(rule, {**contribution.metrics, metric: value})
