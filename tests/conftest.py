"""What holds for all tests."""

from __future__ import annotations

import pytest

from faults import table


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    table.note_rows(items)
