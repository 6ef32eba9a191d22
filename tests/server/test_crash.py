"""Crash points: a process ends by SIGKILL at the point that its environment names, and at no other."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedplat_server
from fedplat_server import crash_points

PROGRAM = """
from fedplat_server import crash_points
for number in range(3):
    crash_points.point("one")
    try:
        with crash_points.step("two"):
            print(number, flush=True)
            if number == 1:
                raise ValueError
    except ValueError:
        print("failed", flush=True)
"""
ALL = ["0", "1", "failed", "2"]


def run(setting: str | None) -> tuple[int, list[str]]:
    environment = {name: value for name, value in os.environ.items() if name != crash_points.VARIABLE}
    if setting is not None:
        environment[crash_points.VARIABLE] = setting
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout.split()


@pytest.mark.parametrize(
    ("setting", "printed"),
    [
        ("one", []),
        ("one:2", ["0"]),
        ("two.before", []),
        ("two.before:3", ["0", "1", "failed"]),
        ("two.after", ["0"]),
        ("two.after:2", ALL),  # a step that failed has no "after"
    ],
)
def test_the_process_is_killed_at_the_point(setting: str, printed: list[str]) -> None:
    assert run(setting) == (-signal.SIGKILL, printed)


@pytest.mark.parametrize("setting", [None, "", "three", "one:4", "two", "two.after:3"])
def test_it_continues_when_the_point_is_not_reached(setting: str | None) -> None:
    assert run(setting) == (0, ALL)


def named() -> Iterator[tuple[str, str, ast.expr | None]]:
    """File, function and name of every crash point of the server."""
    folder = Path(next(iter(fedplat_server.__path__)))
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                value = node.func.value
                if isinstance(value, ast.Name) and value.id == "crash_points":
                    yield path.name, node.func.attr, node.args[0] if node.args else None


def test_every_name_is_a_literal_and_is_used_once() -> None:
    names: Counter[str] = Counter()
    for file, function, name in named():
        assert function in ("point", "step"), file
        assert isinstance(name, ast.Constant), f"{file}: the crash matrix reads the names from the source"
        assert isinstance(name.value, str), file
        names.update([name.value] if function == "point" else [f"{name.value}.before", f"{name.value}.after"])
    assert len(names) > 20
    assert [name for name, count in names.items() if count > 1] == []
