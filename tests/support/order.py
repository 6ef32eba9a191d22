"""The order of test modules, drawn from a seed, which shows tests that depend on what ran before them."""

from __future__ import annotations

import random

import pytest


def shuffle_modules(items: list[pytest.Item], seed: int) -> None:
    """Sort tests by modules in a random order; the tests of a module stay together and in their order."""
    modules = sorted({module_of(item) for item in items})
    random.Random(seed).shuffle(modules)
    places = {module: place for place, module in enumerate(modules)}
    items.sort(key=lambda item: places[module_of(item)])


def module_of(item: pytest.Item) -> str:
    """Return the file of a test."""
    return item.nodeid.partition("::")[0]
