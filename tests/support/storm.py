"""What befell the stores of the tests that ran on ones that fail, put together over pytest's worker processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

IN_EVERY_RUN = ("test_check_in",)
"""Modules whose second run is not slow: a sample for `make test`; the others' are left to `make test-all`."""
PROPERTY = "faults of the store"
"""A property of a test's last report: its faults by kind."""


def marks(module: str) -> list[pytest.MarkDecorator]:
    """The marks of a module's second run."""
    proves = pytest.mark.fault("F9", "F10")
    return [proves] if module in IN_EVERY_RUN else [proves, pytest.mark.slow]


def summary(stats: Mapping[str, Sequence[Any]]) -> str:
    """A line for the end of a run, or nothing if there was no such test."""
    total, tests = Counter[str](), 0
    for report in (one for reports in stats.values() for one in reports if isinstance(one, pytest.TestReport)):
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == PROPERTY:
                tests += 1
                total.update(cast(dict[str, int], value))
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(total.items()))
    return f"{tests} tests ran on stores that fail: {faults}" if tests else ""
