"""The files whose names and sentences are checked."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("fedplat", "server/fedplat_server", "client/fedplat_client")
GENERATED = ("fedplat/wire/v1", "server/fedplat_server/database/migrations/versions")


@functools.cache
def module_paths() -> list[str]:
    """List every module of the three distributions that a person wrote."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    written = [path.relative_to(ROOT).as_posix() for path in paths]
    return [path for path in written if not path.startswith(GENERATED)]


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Parse every module in `module_paths`."""
    return {path: ast.parse((ROOT / path).read_text()) for path in module_paths()}


@functools.cache
def texts() -> dict[str, str]:
    """Read every file with sentences for people: modules, protocol, documents, examples and container files."""
    folders = {*PACKAGES, "proto", "docs", "examples", "docker", "benchmarks"}
    kinds = {".py", ".md", ".proto", ".toml", ".yaml", ".yml", ".sh"}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    paths += [ROOT / name for name in ("README.md", "CHANGELOG.md", "Makefile", "pyproject.toml")]
    written = [path.relative_to(ROOT).as_posix() for path in sorted(paths)]
    return {path: (ROOT / path).read_text() for path in written if not path.startswith(GENERATED)}


@functools.cache
def texts_of_tests() -> dict[str, str]:
    """Read every module of the tests, except for those in this folder."""
    paths = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("*.py"))]
    return {path: (ROOT / path).read_text() for path in paths if area_of(path) != "tests/style"}


def comment_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a module, also those of its variables, as numbered lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                yield from enumerate(lines[first - 1 : last], first)
            case _:
                pass


def area_of(path: str) -> str:
    """Return the folder of a file, three levels deep at most."""
    return "/".join(path.split("/")[:-1][:3])


def areas(paths: Iterable[str]) -> list[str]:
    """List the folders of files, for one test each."""
    return sorted({area_of(path) for path in paths})


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions and methods of a module."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a method is read as an attribute."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)
