"""The list of planted faults stays true: each text is there, each test is, and there are enough of every kind."""

from __future__ import annotations

import pytest

from planted_faults import catalog

FAULTS = catalog.read_faults()


def test_every_fault_can_be_planted() -> None:
    problems = {fault.name: problem for fault in FAULTS if (problem := fault.find_problem(catalog.ROOT))}
    assert problems == {}


def test_a_planted_fault_is_not_an_error_of_syntax() -> None:
    for fault in FAULTS:
        text = (catalog.ROOT / fault.file).read_text("utf-8").replace(fault.old, fault.new)
        compile(text, fault.file, "exec")


def test_the_tests_of_every_fault_are_there() -> None:
    named = {test for fault in FAULTS for test in fault.tests}
    for test in sorted(named):
        file, _, name = test.partition("::")
        assert (catalog.ROOT / file).exists(), test
        assert not name or f"def {name}(" in (catalog.ROOT / file).read_text("utf-8"), test


def test_there_are_enough_faults_of_every_area() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= catalog.NUM_FAULTS
    assert catalog.find_missing(FAULTS) == {}
    assert catalog.find_missing([fault for fault in FAULTS if fault.area != "sql"]) == {"sql": catalog.QUOTAS["sql"]}


@pytest.mark.parametrize(
    ("change", "error"),
    [({"area": "weather"}, "the area is 'weather'"), ({"new": "a"}, "a fault has a change"), ({"tests": ()}, "tests")],
)
def test_a_fault_that_says_too_little_is_an_error(change: dict[str, str], error: str) -> None:
    table = {"name": "one", "area": "core", "breaks": "x", "file": "f.py", "old": "a", "new": "b", "tests": ("t",)}
    with pytest.raises(ValueError, match=error):
        catalog.Fault(**(table | change))  # type: ignore[arg-type]
