"""Which tests of the collected modules run, and in which order."""

from __future__ import annotations

import random
from collections.abc import Container

import pytest


def shuffle_modules(items: list[pytest.Item], seed: int) -> None:
    """Sort tests by modules in a random order, which shows tests that depend on what ran before them.

    The tests of a module stay together and in their order.
    """
    modules = sorted({module_of(item) for item in items})
    random.Random(seed).shuffle(modules)
    places = {module: place for place, module in enumerate(modules)}
    items.sort(key=lambda item: places[module_of(item)])


def take_out_slow(items: list[pytest.Item], modules: Container[str]) -> list[pytest.Item]:
    """Take the slow tests of some modules out of the items, and return them."""
    taken = [item for item in items if item.get_closest_marker("slow") and module_of(item) in modules]
    items[:] = [item for item in items if item not in taken]
    return taken


def module_of(item: pytest.Item) -> str:
    """Return the file of a test."""
    return item.nodeid.partition("::")[0]
