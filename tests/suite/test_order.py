"""Modules in an order that a seed draws."""

from __future__ import annotations

import itertools
import types
from typing import Any

from support.order import shuffle_modules, take_out_slow

NAMES = [f"tests/test_{module}.py::test_{number}" for number in range(3) for module in "abcdef"]


def shuffled(seed: int) -> list[str]:
    items: list[Any] = [types.SimpleNamespace(nodeid=name) for name in NAMES]
    shuffle_modules(items, seed)
    return [item.nodeid for item in items]


def test_the_tests_of_a_module_stay_together_and_in_their_order() -> None:
    found = shuffled(1)
    assert sorted(found) == sorted(NAMES)
    for _, names in itertools.groupby(found, key=lambda name: name.partition("::")[0]):
        assert [name[-1] for name in names] == ["0", "1", "2"]


def test_the_order_is_that_of_the_seed() -> None:
    assert shuffled(1) == shuffled(1)
    assert len({tuple(shuffled(seed)) for seed in range(10)}) > 5


def test_a_module_may_be_without_its_slow_tests() -> None:
    def make(name: str) -> Any:
        def get_closest_marker(mark: str) -> bool:
            return mark == "slow" and name.endswith("1")

        return types.SimpleNamespace(nodeid=name, get_closest_marker=get_closest_marker)

    items = [make(name) for name in NAMES]
    taken = take_out_slow(items, {"tests/test_a.py", "tests/test_b.py"})
    assert {item.nodeid for item in taken} == {"tests/test_a.py::test_1", "tests/test_b.py::test_1"}
    assert len(items) == len(NAMES) - 2
