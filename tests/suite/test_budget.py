"""The recorded costs of all tests are within the budget: `tests/support/costs.py`."""

from __future__ import annotations

from support import costs
from support.costs import BUDGET_CPU_S, LONGEST_CPU_S

COLLECTION_CPU_S = 40.0
"""What two workers need to start, and to import and collect all tests."""
MODULES = costs.read().modules


def test_each_module_is_recorded_and_exists() -> None:
    hint = "run pytest --record-durations with the new modules (docs/contributing.md)"
    assert set(costs.all_modules()) == MODULES.keys(), hint


def test_the_fast_tests_are_within_their_budget() -> None:
    total_s = sum(module.fast_cpu_s for module in MODULES.values())
    assert total_s + COLLECTION_CPU_S <= BUDGET_CPU_S


def test_no_fast_test_is_long() -> None:
    found = {name: cost.longest_cpu_s for name, cost in MODULES.items() if cost.longest_cpu_s > LONGEST_CPU_S}
    assert found == {}, "mark these tests slow, or make them cheaper"
