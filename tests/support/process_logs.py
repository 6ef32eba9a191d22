"""Logs of the processes that tests start. The report of a failed test shows what they wrote during it."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO, Final

import pytest

SHOWN_BYTES: Final = 6000
"""Of the end of each log."""

_begins: dict[Path, int] = {}
"""The size of each log when the present test began."""


def open_log(path: Path) -> BinaryIO:
    """Open a log to which a process appends, and show it if the test fails."""
    _begins.setdefault(path, _size_of(path))
    return path.open("ab")


def show_log(path: Path) -> None:
    """Show a log that another program opens, if the test fails."""
    _begins.setdefault(path, 0)


def begin_test() -> None:
    """Forget what the logs have by now, and those that are gone."""
    for path in list(_begins):
        if path.exists():
            _begins[path] = _size_of(path)
        else:
            del _begins[path]


def sections() -> list[tuple[str, str]]:
    """Return the title and the end of each log to which a process has written since the test began."""
    shown: list[tuple[str, str]] = []
    for path, begin in _begins.items():
        if _size_of(path) > begin:
            with path.open("rb") as log:
                log.seek(max(begin, _size_of(path) - SHOWN_BYTES))
                shown.append((f"{path.parent.name}/{path.name}", log.read().decode(errors="replace")))
    return shown


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    begin_test()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.extend(sections())
    return report
