"""Which tests run again on a store that fails, and what befell those stores, over all of pytest's worker processes.

CI has a third of them, which the commit chooses: each test has its turn, and a run can be repeated. `make test-all` has
all of them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

IN_EVERY_RUN = ("test_check_in",)
"""Modules whose second run is not slow: a sample for `make test`; the others' are left to `make test-all`."""
PROPERTY = "faults of the store"
"""A property of a test's last report: its faults by kind."""


VARIABLE = "FEDPLAT_STORM_THIRD"
"""Chooses 0, 1, 2 or `all` instead of the commit."""
THIRDS = ("0", "1", "2")


@functools.cache
def chosen() -> str:
    """The third that is no part of the whole grid only, or `all`."""
    if given := os.environ.get(VARIABLE):
        if given not in (*THIRDS, "all"):
            raise pytest.UsageError(f"{VARIABLE} = {given!r}: expected one of {', '.join(THIRDS)}, all")
        return given
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, check=False).stdout  # empty outside of a repository
    return THIRDS[zlib.crc32(commit.strip()) % len(THIRDS)]


def header() -> str:
    """A line for the begin of a run."""
    return f"tests again on stores that fail: {VARIABLE}={chosen()}, and with the whole grid the others"


def marks(module: str, test: str) -> list[pytest.MarkDecorator]:
    """The marks of a test's second run."""
    proves = pytest.mark.fault("F9", "F10")
    if module in IN_EVERY_RUN:
        return [proves]
    third = THIRDS[zlib.crc32(f"{module}::{test}".encode()) % len(THIRDS)]
    return [proves, pytest.mark.slow, *([] if chosen() in (third, "all") else [pytest.mark.grid])]


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
