"""Fixtures for the tests of local training."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def small_matrices(one_thread: None) -> None:
    """Train on one thread."""
