"""The files whose names, sentences and calls are checked: each is read and parsed once."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedplat", "server/fedplat_server", "client/fedplat_client")
GENERATED = ("fedplat/wire/v1/", "server/fedplat_server/database/migrations/versions/")
FOLDERS = ("fedplat", "server", "client", "proto", "docs", "examples", "docker", "benchmarks")
FILES = ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml")
KINDS = frozenset({".py", ".md", ".proto", ".toml", ".yaml", ".yml", ".sh", ".service", ".server", ".client"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    """What a rule refuses, and where."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class Source:
    """One file; the tree of a module is parsed when the first rule asks for it."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, in the order of `ast.walk`."""
        return [*ast.walk(self.tree)]

    @functools.cached_property
    def functions(self) -> list[Function]:
        """All functions and methods of a module."""
        return [node for node in self.nodes if isinstance(node, Function)]

    @property
    def is_module(self) -> bool:
        return self.path.endswith(".py")

    def is_in(self, *folders: str) -> bool:
        return self.path.startswith(tuple(f"{folder}/" for folder in folders))


class Sources:
    """The files of the project, or those that a test of a rule makes up, by their path."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._sources = {path: Source(path, text) for path, text in texts.items()}

    def __iter__(self) -> Iterator[Source]:
        return iter(self._sources.values())

    def __len__(self) -> int:
        return len(self._sources)

    def get(self, path: str) -> Source | None:
        return self._sources.get(path)

    def modules(self) -> list[Source]:
        """List the modules of the three distributions that a person wrote."""
        return [each for each in self if each.is_module and each.is_in(*PACKAGES) and not is_generated(each)]

    def tests(self) -> list[Source]:
        """List the modules of the tests."""
        return [each for each in self if each.is_in("tests")]


def is_generated(source: Source) -> bool:
    return source.path.startswith(GENERATED)


def read() -> Sources:
    """Read all files with code of the project, or with sentences for people."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
    paths += [*(ROOT / "tests").rglob("*.py"), *(ROOT / name for name in FILES)]
    return Sources({path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(paths)})


def is_property(function: Function) -> bool:
    """Return whether a method is read as an attribute."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


def imported(node: ast.AST) -> list[str]:
    """List the modules, and names of modules, that a statement imports; relative ones begin with their dots."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            start = f"{'.' * level}{module or ''}"
            return [start, *(f"{start}.{alias.name}" for alias in names)]
        case _:
            return []
