"""Finds and loads evaluators: `module:function` (the current folder counts) or `/path/to/file.py:function`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fedplat_server.errors import ConfigError

Evaluator = Callable[..., Mapping[str, float]]
"""Scores a model on the server's own data: `evaluate(parameters) -> metrics`."""
_EXPECTED = "expected module:function or /path/to/file.py:function"


def check(reference: str) -> None:
    """Raises `ConfigError` if there is no such function. Runs nothing of it: the daemon stays free of its imports."""
    name, function = _parts(reference)
    file = _source(name)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as exc:
        raise ConfigError(f"the evaluator {reference!r} cannot be read: {exc}") from exc
    names = set(_names(tree))
    if function not in names and "*" not in names:
        raise ConfigError(f"{file} has no function {function!r}")


def load(reference: str) -> Evaluator:
    """Imports an evaluator. Raises `ConfigError`, and whatever its module raises."""
    name, attribute = _parts(reference)
    file = Path(name).resolve() if name.endswith(".py") else None
    folder = str(file.parent if file is not None else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name) if file is None else _load_file(file)
    except ImportError as exc:
        raise ConfigError(f"{reference!r} cannot be imported from {folder}: {exc}") from exc
    function: Any = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{name!r} has no function {attribute!r}")
    return cast(Evaluator, function)


def _parts(reference: str) -> tuple[str, str]:
    name, _, function = reference.rpartition(":")
    if not name or not function.isidentifier():
        raise ConfigError(f"{reference!r} names no function; {_EXPECTED}")
    return name, function


def _load_file(file: Path) -> ModuleType:
    # Under a name of its own: two files may be called alike, or like a module that is imported already.
    name = f"{file.stem}_{sha256(str(file).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ConfigError(f"there is no file {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _source(name: str) -> Path | None:
    """The file of a module, found without importing it or its packages."""
    if name.endswith(".py"):
        file = Path(name).resolve()
        if not file.is_file():
            raise ConfigError(f"there is no file {file}")
        return file
    parts = name.split(".")
    for folder in (Path.cwd(), *map(Path, sys.path)):
        for file in (folder.joinpath(*parts, "__init__.py"), folder.joinpath(*parts[:-1], f"{parts[-1]}.py")):
            if file.is_file():
                return file
    if not all(part.isidentifier() for part in parts) or importlib.util.find_spec(parts[0]) is None:
        raise ConfigError(f"there is no module {name!r} in {Path.cwd()} or on the import path; {_EXPECTED}")
    return None  # found in a way of its own (a zip file, compiled code): `load` will see


def _names(tree: ast.Module) -> Iterator[str]:
    """What a module binds anywhere: a function may be defined under a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
