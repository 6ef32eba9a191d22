"""The order of batches is the same for all who train."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.pytorch.training import LocalOptions, StepSchedule


def make_plan(num_examples: int, *, fraction: float = 1.0, smallest: int = 1, **options: int) -> StepSchedule:
    given = LocalOptions(**({"epochs": 1, "batch_size": 4, "learning_rate": 0.1} | options))  # type: ignore[arg-type]
    return StepSchedule(num_examples=num_examples, options=given, seed=5, fraction=fraction, smallest=smallest)


def sizes(plan: StepSchedule) -> list[int]:
    return [len(step) for step in plan.steps()]


def test_each_epoch_is_a_permutation_cut_into_batches() -> None:
    plan = make_plan(10, epochs=2)
    rng = np.random.default_rng([5, 0])
    expected = np.concatenate([rng.permutation(10), rng.permutation(10)])
    np.testing.assert_array_equal(np.concatenate(list(plan.steps())), expected)
    assert sizes(plan) == [4, 4, 2, 4, 4, 2]
    assert plan.num_steps == 6
    np.testing.assert_array_equal(np.concatenate(list(plan.steps())), expected)  # as often as it is asked for


def test_no_batch_size_means_all_data_at_once() -> None:
    assert sizes(make_plan(10, batch_size=0, epochs=2)) == [10, 10]


def test_accumulated_batches_are_one_step() -> None:
    plan = make_plan(11, accumulate=2)
    assert sizes(plan) == [8, 3]
    assert [[len(batch) for batch in plan.batches_of(step)] for step in plan.steps()] == [[4, 4], [3]]
    larger = make_plan(11, batch_size=8)
    assert [step.tolist() for step in plan.steps()] == [step.tolist() for step in larger.steps()]


@pytest.mark.parametrize(("num_steps", "expected"), [(2, [4, 4]), (5, [4, 4, 2, 4, 4]), (6, [4, 4, 2, 4, 4, 2])])
def test_a_number_of_steps_is_a_part_of_an_epoch_or_several(num_steps: int, expected: list[int]) -> None:
    plan, whole = make_plan(10, max_steps=num_steps), make_plan(10, epochs=2)
    assert sizes(plan) == expected
    assert plan.num_steps == num_steps
    assert [step.tolist() for step in plan.steps()] == [step.tolist() for step in whole.steps()][:num_steps]
    assert make_plan(10, max_steps=num_steps, fraction=0.5).num_steps == max(1, num_steps // 2)


def test_steps_and_epochs_are_not_both_stated() -> None:
    with pytest.raises(ValueError, match=r"max_steps = 5: .* expected epochs = 1 with max_steps, or max_steps = 0"):
        make_plan(10, max_steps=5, epochs=2)


@pytest.mark.parametrize(("num_examples", "expected"), [(9, [4, 4]), (10, [4, 4, 2]), (1, [1]), (5, [4])])
def test_a_single_example_at_the_end_is_left_out(num_examples: int, expected: list[int]) -> None:
    plan = make_plan(num_examples, smallest=2)
    assert sizes(plan) == expected
    assert plan.num_steps == len(expected)


@pytest.mark.parametrize(("fraction", "num_steps"), [(1.0, 6), (0.5, 3), (0.99, 5), (0.7, 4), (0.01, 1)])
def test_a_fraction_of_the_steps_is_their_beginning(fraction: float, num_steps: int) -> None:
    whole, part = make_plan(10, epochs=2), make_plan(10, epochs=2, fraction=fraction)
    assert part.num_steps == num_steps
    first = [step.tolist() for step in whole.steps()][:num_steps]
    assert [step.tolist() for step in part.steps()] == first
