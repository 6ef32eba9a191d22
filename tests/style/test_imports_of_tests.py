"""Code that tests share is in `tests/support`: no test is a library for another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from style.sources import ROOT

TESTS = ROOT / "tests"
PATHS = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))
DISTRIBUTIONS = frozenset({"client", "core", "server"})
"""Folders of tests that would read as a distribution in an import."""


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield each module, and each name of a module, that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def is_refused(name: str) -> bool:
    """Tell whether a test may not import this."""
    parts = name.split(".")
    return parts[0] in DISTRIBUTIONS or any(part == "conftest" or part.startswith("test_") for part in parts)


@pytest.mark.parametrize("folder", sorted({path.rpartition("/")[0] for path in PATHS}))
def test_nothing_is_imported_from_a_test(folder: str) -> None:
    paths = [path for path in PATHS if path.rpartition("/")[0] == folder]
    found = {path: [*filter(is_refused, imported(ast.parse((TESTS / path).read_text())))] for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("from support import daemons", False),
        ("from support.daemons import running", False),
        ("from fedplat_server.cli import main", False),
        ("from server.harness import running", True),
        ("import core.rounds.driver", True),
        ("from faults.test_network import silent", True),
        ("from faults import test_network", True),
        ("from faults.conftest import folder", True),
    ],
)
def test_what_is_refused(text: str, refused: bool) -> None:
    (name,) = imported(ast.parse(text))
    assert is_refused(name) == refused
