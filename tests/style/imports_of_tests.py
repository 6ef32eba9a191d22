"""Code that tests share is in `tests/support`: no test is a library for another one."""

from __future__ import annotations

from collections.abc import Iterator

from style.sources import Finding, Sources, imported

DISTRIBUTIONS = frozenset({"client", "core", "server"})
"""Folders of tests that would read as a distribution in an import."""


def is_refused(name: str) -> bool:
    """Return whether a test may not import this."""
    parts = name.split(".")
    return parts[0] in DISTRIBUTIONS or any(part == "conftest" or part.startswith("test_") for part in parts)


def check(sources: Sources) -> Iterator[Finding]:
    for source in sources.tests():
        for node in source.nodes:
            if names := [*filter(is_refused, imported(node))]:
                yield Finding(source.path, getattr(node, "lineno", 0), f"a test imports {names[0]}")
