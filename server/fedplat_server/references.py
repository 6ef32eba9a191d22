"""Finds and loads what operators name: `module:name` (the current folder counts) or `/path/to/file.py:name`.

Evaluators and trainers are foreign code, which runs in processes of its own. The daemon only looks whether it is there.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from fedplat_server.errors import ConfigError

_EXPECTED = "expected module:name or /path/to/file.py:name"


def check(reference: str) -> None:
    """Raises `ConfigError` if there is no such thing. Runs nothing of it: the daemon stays free of its imports."""
    name, attribute = _parts(reference)
    file = _source(name)
    if file is None:
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError) as exc:
        raise ConfigError(f"{reference!r} cannot be read: {exc}") from exc
    names = set(_names(tree))
    if attribute not in names and "*" not in names:
        raise ConfigError(f"{file} has no {attribute!r}")


def absolute(reference: str) -> str:
    """The reference with a path that means the same in every folder; a module stays one."""
    name, attribute = _parts(reference)
    return f"{Path(name).resolve()}:{attribute}" if name.endswith(".py") else reference


def load(reference: str, folder: str = "") -> Any:
    """Imports what is named; modules are also looked for in `folder` (else: the current one).

    Raises `ConfigError`, and whatever the module raises.
    """
    name, attribute = _parts(reference)
    file = Path(name).resolve() if name.endswith(".py") else None
    folder = str(file.parent if file is not None else folder or Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name) if file is None else _load_file(file)
    except ImportError as exc:
        raise ConfigError(f"{reference!r} cannot be imported from {folder}: {exc}") from exc
    found: Any = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"{name!r} has no {attribute!r}")
    return found


def _parts(reference: str) -> tuple[str, str]:
    name, _, attribute = reference.rpartition(":")
    if not name or not attribute.isidentifier():
        raise ConfigError(f"{reference!r} names nothing; {_EXPECTED}")
    return name, attribute


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
