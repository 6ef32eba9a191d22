"""Prints the test modules that a change can reach, no one if all must run: what `.ci/run` gives to pytest.

Slow tests run in the modules nearest to the change until `SLOW_CPU_S` are spent; `--fast-only` names the other modules.
The commit chooses among those that are equally near, so that each has its turn, and a run can be repeated.

A change is what differs from the commit in `.ci/verified`, on which `make test-all` has passed. The imports of all
modules, read without running them, lead from a changed file to the tests that depend on it. `inputs.toml` beside this
file lists what imports do not show: the files that tests read, and the tests that start programs.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import math
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from support import costs

ROOT = Path(__file__).resolve().parents[2]
VERIFIED = ROOT / ".ci" / "verified"
INPUTS = Path(__file__).with_name("inputs.toml")
SHARED = (
    *("pyproject.toml", "client/pyproject.toml", "server/pyproject.toml", "constraints.txt", "Makefile", "proto/"),
    *(".ci/run", "tests/conftest.py", "tests/in_memory.sh", "tests/support/selection.py", "tests/support/inputs.toml"),
)
"""A change of these reaches everything."""
SLOW_CPU_S = 500.0
"""Of the slow tests of a run, a third of what all of them cost, as `tests/durations.json` records it."""
PRODUCT = ("fedplat/", "server/fedplat_server/", "client/fedplat_client/")
COMMAND_TREE = "fedplat/cli/app.py"
"""It imports every command; what a test of it reaches are the commands that `inputs.toml` lists for the test."""
PROGRAMS = {
    "programs": PRODUCT,
    "daemon": (*(f"server/fedplat_server/cli/{name}.py" for name in ("init", "serving", "workers")), PRODUCT[2]),
    "operator": (
        *(f"fedplat/cli/{name}.py" for name in ("clients", "enrollments", "events", "jobs", "models", "operators")),
        *(f"fedplat/cli/{name}.py" for name in ("privacy", "round_description", "session", "webhooks")),
    ),
}
"""What `inputs.toml` calls by a name: the whole product; a daemon, its pool and clients; an operator's commands."""
FOLDERS = ("fedplat", "server", "client", "tests", "benchmarks", "examples", "docs/site")
"""The folders with Python."""
PATH = ("", "server", "client", "tests", "benchmarks", "benchmarks/papers", "docs/site", "examples/large")
"""The folders that the tests import from (`pythonpath` in pyproject.toml)."""
_REFERENCE = re.compile(r"((?:fedplat(?:_server|_client)?|support)(?:\.[A-Za-z_]\w*)+)(?::\w+)?")


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Which files depend on a file directly, and which of them are tests. Paths are relative to the root."""

    dependants: Mapping[str, frozenset[str]]
    tests: frozenset[str]
    readers: Mapping[str, frozenset[str]]
    """The modules that read files, or start programs, by the prefixes of their paths (`inputs.toml`)."""

    def reach(self, changed: Iterable[str]) -> dict[str, float]:
        """Return the tests that depend on changed files, with the number of steps to them.

        They are all tests, infinitely far, if a shared part has changed or nothing is known about a file.
        """
        steps, nearest, to_do = 0, dict[str, float](), set[str]()
        for path in changed:
            starts = set(self._starts(path))
            if path.startswith(SHARED) or not starts:
                nearest |= dict.fromkeys(self.tests, math.inf)
            to_do |= starts
        while to_do:
            nearest |= dict.fromkeys(to_do, steps)
            to_do = {user for path in to_do for user in self._users(path) if nearest.get(user, math.inf) == math.inf}
            steps += 1
        return {path: distance for path, distance in nearest.items() if path in self.tests}

    def _users(self, path: str) -> set[str]:
        """Return the modules that depend on a file directly."""
        readers = (modules for prefix, modules in self.readers.items() if path.startswith(prefix))
        return set(self.dependants.get(path, ())).union(*readers)

    def _starts(self, path: str) -> Iterator[str]:
        """Yield the files from which a change of this one spreads."""
        yield from self._users(path)
        yield from self._users(_run(path))
        if path in self.tests or path in self.dependants:
            yield path
        elif path.startswith((*PRODUCT, "tests/")):  # data, templates, and what was deleted
            yield from self._neighbours(path)

    def _neighbours(self, path: str) -> Iterator[str]:
        """Yield the modules of the nearest folder that has some."""
        for folder in Path(path).parents:
            known = [each for each in (*self.dependants, *self.tests) if Path(each).parent == folder]
            if known:
                yield from known
                return


def read_graph(root: Path = ROOT) -> Graph:
    """Return the graph of a checkout."""
    files = [path.relative_to(root).as_posix() for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    dependants = _read_imports(root, files)
    tests = frozenset(file for file in files if file.startswith("tests/") and Path(file).name.startswith("test_"))
    for test in tests:
        for folder in Path(test).parents:
            dependants[f"{folder.as_posix()}/conftest.py"].add(test)
    listed: dict[str, list[str]] = tomllib.loads((root / INPUTS.relative_to(ROOT)).read_text())
    readers: defaultdict[str, set[str]] = defaultdict(set)
    for name, prefixes in listed.items():
        modules_of_name = [file for file in files if file == name or (name.endswith("/") and file.startswith(name))]
        for prefix in prefixes:
            for each in PROGRAMS.get(prefix, (prefix,)):
                readers[each].update(modules_of_name)
    return Graph(_freeze(dependants), tests, _freeze(readers))


def _read_imports(root: Path, files: Sequence[str]) -> defaultdict[str, set[str]]:
    """Return the files that import a file."""
    modules = {name: file for file in files for name in _names(file)}
    dependants: defaultdict[str, set[str]] = defaultdict(set)
    for file in files:
        tree = ast.parse((root / file).read_text())
        for used in _uses(file, tree, modules):
            if file != COMMAND_TREE or not used.startswith("fedplat/cli/"):
                dependants[used].add(file)
        if file.endswith("/__init__.py"):
            for used in _uses(file, tree, modules, functions=False):
                dependants[used].add(_run(file))
    return dependants


def _freeze(sets: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    return {name: frozenset(each) for name, each in sets.items()}


def _names(file: str) -> Iterator[str]:
    """Yield the names by which a file is imported."""
    for folder in PATH:
        if file.startswith(f"{folder}/" if folder else ""):
            name = file.removeprefix(f"{folder}/" if folder else "").removesuffix(".py").removesuffix("/__init__")
            yield name.replace("/", ".")


def _run(file: str) -> str:
    """Return the name, in the graph, of what runs when a module of this package is imported: not its functions."""
    return f"{file} when imported"


def _uses(file: str, tree: ast.AST, modules: Mapping[str, str], functions: bool = True) -> Iterator[str]:
    """Yield the files that a module imports, or names in a text such as "package.module:function"."""
    is_product = file.startswith(PRODUCT)
    for name in _find_names(tree, file, functions):
        parts = name.split(".")
        if is_product and not parts[0].startswith("fedplat"):
            continue  # a package of others, with the name of a program here
        found = [modules[each] for each in (".".join(parts[: n + 1]) for n in range(len(parts))) if each in modules]
        yield from map(_run, found[:-1])  # importing a.b.c runs a and a.b, too
        yield from (each for each in found[-1:] if each != file)


def _find_names(tree: ast.AST, file: str, functions: bool) -> Iterator[str]:
    to_do = [tree]
    while to_do:
        node = to_do.pop()
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                to_do += node.orelse
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() if not functions:
                continue
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                package = ".".join([*Path(file).parts[:-level], *([module] if module else [])]) if level else module
                yield from (f"{package}.{alias.name}" for alias in names)
            case ast.Constant(value=str(text)) if found := _REFERENCE.fullmatch(text):
                yield found[1]
            case _:
                pass
        to_do += ast.iter_child_nodes(node)


def read_changes(root: Path = ROOT) -> list[str] | None:
    """Return the paths that differ from the verified commit; None if it is not known here."""
    verified = root / VERIFIED.relative_to(ROOT)
    if not verified.exists():
        return None
    commit = verified.read_text().strip()
    found: list[str] = []
    for command in (["diff", "--name-only", "--no-renames", commit], ["ls-files", "-o", "--exclude-standard"]):
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return None
        found += done.stdout.splitlines()
    return [path for path in found if root / path != verified]


def choose_slow(reached: Mapping[str, float], slow_cpu_s: Mapping[str, float], commit: str) -> set[str]:
    """Return the modules whose slow tests run: the nearest, and of equally near ones those that the commit chooses.

    A module that does not fit into what is left of `SLOW_CPU_S` is passed over; the first one always runs.
    """
    chosen, left = set[str](), SLOW_CPU_S
    for module in sorted(
        reached, key=lambda each: (reached[each], hashlib.sha256(f"{commit} {each}".encode()).digest())
    ):
        if not chosen or slow_cpu_s.get(module, 0.0) <= left:
            chosen.add(module)
            left -= slow_cpu_s.get(module, 0.0)
    return chosen


def read_commit(root: Path = ROOT) -> str:
    """Return the commit of a checkout, "" outside of a repository."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Print arguments of pytest, one a line; the reason goes to stderr."""
    changes = read_changes()
    graph = read_graph()
    reached = graph.reach(changes) if changes is not None else dict.fromkeys(graph.tests, math.inf)
    slow_cpu_s = {name: cost.slow_cpu_s for name, cost in costs.read().modules.items()}
    left_out = sorted(set(reached) - choose_slow(reached, slow_cpu_s, read_commit()))
    print(f"{len(reached)} of {len(graph.tests)} test modules depend on what has changed", file=sys.stderr)
    if left_out:
        total, less = (sum(slow_cpu_s.get(name, 0.0) for name in names) for names in (reached, left_out))
        print(
            f"without the slow tests of {len(left_out)} of them, {less:.0f} of {total:.0f} CPU seconds; "
            "make test-all has all of them",
            file=sys.stderr,
        )
    modules = sorted(reached) if len(reached) < len(graph.tests) else []
    print("\n".join([*modules, *(f"--fast-only={name}" for name in left_out)]))


if __name__ == "__main__":
    main()
