"""What the tests cost is measured, added up and compared with the budget."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import costs
from support.costs import Cost, ModuleCost

BURN = """
import sys, time
while time.process_time() < 0.5:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_the_seconds_of_processes_count_while_they_live_and_when_they_have_ended() -> None:
    before = costs.tree_cpu_s()
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}], check=True)"
    with subprocess.Popen([sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        alive = costs.tree_cpu_s()
        process.communicate(b"")
    assert before + 0.4 < alive <= costs.tree_cpu_s() + 0.05  # the kernel counts ticks of 10 ms


def test_costs_of_modules_are_sums() -> None:
    tests = [
        Cost("tests/a.py::one", False, cpu_s=1.0, own_cpu_s=0.5, wall_s=2.0),
        Cost("tests/a.py::two[x::y]", False, cpu_s=0.75, own_cpu_s=0.75, wall_s=1.0),
        Cost("tests/a.py::three", True, cpu_s=3.0, own_cpu_s=3.0, wall_s=4.0),
        Cost("tests/b.py::one", True, cpu_s=5.0, own_cpu_s=5.0, wall_s=6.0),
    ]
    assert costs.sum_up(tests, 2.0) == {
        "tests/a.py": ModuleCost(3.5, 6.0, 6.0, 8.0, longest_cpu_s=1.5),
        "tests/b.py": ModuleCost(slow_cpu_s=10.0, slow_wall_s=12.0),
    }


@pytest.mark.parametrize(
    ("run_cpu_s", "own_cpu_s", "slow", "excesses"),
    [
        (419.0, 2.9, 1.0, []),
        (421.0, 0.1, 1.0, ["the fast tests exceed their budget"]),
        (421.0, 5.9, 2.0, []),  # a machine that is half as fast
        (100.0, 3.1, 1.0, ["tests/a.py::one: 3.1 CPU seconds; expected at most 1.5"]),
    ],
)
def test_a_run_that_exceeds_the_budget_fails(
    run_cpu_s: float, own_cpu_s: float, slow: float, excesses: list[str]
) -> None:
    test = Cost("tests/a.py::one", False, cpu_s=own_cpu_s, own_cpu_s=own_cpu_s, wall_s=1.0)
    found = costs.check_budget([test], run_cpu_s, slow)
    assert found.summary.startswith(f"{run_cpu_s:.0f} CPU seconds for 1 fast tests; the budget is 420")
    assert len(found.excesses) == len(excesses)
    assert all(line.startswith(start) for line, start in zip(found.excesses, excesses, strict=True))


def test_a_run_with_slow_tests_is_not_judged() -> None:
    slow = Cost("tests/a.py::slow", True, cpu_s=900.0, own_cpu_s=900.0, wall_s=1.0)
    fast = Cost("tests/a.py::fast", False, cpu_s=500.0, own_cpu_s=500.0, wall_s=1.0)
    found = costs.check_budget([slow, fast], 1400.0, 1.0)
    assert found.summary.startswith("500 CPU seconds for 1 fast tests")
    assert found.excesses == []


def test_a_run_beside_other_programs_is_not_judged() -> None:
    test = Cost("tests/a.py::one", False, cpu_s=9.0, own_cpu_s=9.0, wall_s=1.0)
    assert len(costs.check_budget([test], 421.0, 1.0, others_cpu_s=80.0).excesses) == 2
    found = costs.check_budget([test], 421.0, 1.0, others_cpu_s=900.0)
    assert found.summary.endswith("; not judged, as other programs took 900 CPU seconds beside it")
    assert found.excesses == []
