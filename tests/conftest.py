"""What holds for all tests."""

from __future__ import annotations

import pytest

from faults import table
from server import storm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    table.note_rows(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if line := storm.summary(terminalreporter.stats):
        terminalreporter.write_line(line)
