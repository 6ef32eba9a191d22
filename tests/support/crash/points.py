"""All crash points of the server, found in its source text: a new one is tested without being remembered."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fedplat_server

SOURCE = Path(fedplat_server.__file__).parent


def all_points(source: Path = SOURCE) -> list[str]:
    """Names of points, in the order of files. Raises `ValueError` for one that cannot be known, or is taken."""
    found: dict[str, str] = {}
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        if path.name == "crash_points.py" or "crash_points." not in text:
            continue
        for name, line in _points(ast.parse(text), path):
            place = f"{path.relative_to(source)}:{line}"
            if name in found:
                raise ValueError(f"{place}: the crash point {name} is at {found[name]} already")
            found[name] = place
    return list(found)


def _points(tree: ast.Module, path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "crash_points"):
            continue
        if node.func.attr not in ("point", "step"):
            continue
        arguments = [one.value if isinstance(one, ast.Constant) else None for one in node.args]
        if len(arguments) != 1 or not isinstance(arguments[0], str):
            raise ValueError(f"{path}:{node.lineno}: the name of a crash point must be one literal text")
        name = arguments[0]
        names = [name] if node.func.attr == "point" else [f"{name}.before", f"{name}.after"]
        yield from ((each, node.lineno) for each in names)
