"""The combinations that the tests of every run have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.pairwise import cover, pairs, pairwise

LAYOUTS = ("shard", "data", "tensor", "pipeline", "replicas")
RATES = {"low": 0.1, "high": 0.5, "zero": 0.0}
ENDS = ("killed", "stopped")


def names_of(parameters: Sequence[object]) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """The combinations that every run has, and those of the whole grid only."""
    needed, others = set[tuple[str, ...]](), set[tuple[str, ...]]()
    for each in parameters:
        (others if getattr(each, "marks", ()) else needed).add(tuple(str(getattr(each, "id", "")).split("-")))
    return needed, others


@pytest.mark.parametrize("axes", [(LAYOUTS,), (LAYOUTS, RATES), (LAYOUTS, RATES, ENDS), (RATES, ENDS, LAYOUTS, RATES)])
def test_every_pair_is_in_a_combination_that_every_run_has(axes: tuple[Sequence[str], ...]) -> None:
    needed, others = names_of(pairwise(*axes))
    assert not needed & others
    for one in range(len(axes)):
        for two in range(one + 1, len(axes)):
            expected = {(left, right) for left in axes[one] for right in axes[two]}
            assert {(names[one], names[two]) for names in needed} == expected
    num_combinations = 1
    for axis in axes:
        num_combinations *= len(axis)
    assert len(needed | others) == num_combinations
    assert (len(axes) < 3) == (not others)


def test_few_combinations_are_needed() -> None:
    """No cover of two axes with five and three values is smaller than 15, and of four axes with three than 9."""
    assert len(names_of(pairwise(LAYOUTS, RATES, ENDS))[0]) == 15
    assert len(names_of(pairwise(RATES, RATES, RATES, RATES))[0]) <= 11


def test_a_value_can_occur_in_all_combinations_of_the_others() -> None:
    needed, others = names_of(pairwise(LAYOUTS, RATES, ENDS, full=(1,)))
    assert {names for names in needed if names[1] == "low"} == {(one, "low", two) for one in LAYOUTS for two in ENDS}
    assert others


def test_values_are_given_by_their_names() -> None:
    first = pairwise(LAYOUTS, RATES)[0]
    assert (first.id, first.values) == ("shard-low", ("shard", 0.1))


def test_the_cover_is_always_the_same_one_and_begins_with_what_is_given() -> None:
    whole = [(one, two, three) for one in "abc" for two in "de" for three in "fgh"]
    found = cover(whole, whole[-2:])
    assert found == cover(list(whole), whole[-2:])
    assert {*whole[-2:]} <= found
    assert set[object]().union(*map(pairs, found)) == set[object]().union(*map(pairs, whole))
