"""Every fenced block of the documentation is run, checked, or states why no test runs it."""

from __future__ import annotations

import ast
import collections
import json
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tomli_w
import yaml

from fedplat.config.plugins import Plugins, kinds
from fedplat.job import parse_job
from style.sources import Finding, Sources
from support.docs import commands
from support.docs.blocks import OWN_TESTS, Block, read, read_all

LANGUAGES = {"bash", "console", "dockerfile", "json", "python", "text", "toml", "yaml"}
ADVICE = "see 'Writing documentation' in docs/contributing.md"
JOB: dict[str, Any] = {
    "name": "digits",
    "population": "demo",
    "trainer": "digits",
    "rounds": 10,
    "model": {"initial": "model:initial"},
    "selection": {"goal": 2},
}
"""What a job file needs; the blocks of pages are parts of job files."""


def check(sources: Sources) -> Iterator[Finding]:
    blocks = read_all()
    for block in blocks:
        for message in mistakes(block):
            yield Finding(block.page, block.line, message)
    yield from check_own_tests(sources, blocks)
    states = collections.Counter(map(state_of, blocks))
    known = states["executed"] + states["checked"]
    if states["executed"] <= states["checked"] or known <= 2 * states["not run"]:
        yield Finding("docs", 0, f"too few blocks run: {dict(states)}")


def state_of(block: Block) -> str:
    """Return what happens to a block."""
    if block.own_test or block.is_run_here:
        return "executed"
    return "checked" if block.is_checked else "not run"


def mistakes(block: Block) -> Iterator[str]:
    """Yield what is wrong with a block; what a parser raises is the message."""
    if block.language not in LANGUAGES:
        yield f"a block of {block.language or 'no language'}; {ADVICE}"
    if block.marker and not block.reason and not block.own_test:
        yield f"no test runs <!-- {block.marker} -->; {ADVICE}"
    if not (block.reason or block.own_test or block.is_run_here or block.is_checked):
        yield f"no test runs it; {ADVICE}"
    try:
        yield from READERS.get(block.language, lambda _: ())(block)
    except Exception as exc:
        yield f"{type(exc).__name__}: {exc}"


def read_commands(block: Block) -> Iterator[str]:
    """Yield what the programs refuse."""
    text = block.text
    if block.language == "console":
        text = "\n".join(line for line in text.splitlines() if line.startswith("$ "))
    found = commands.find(text)
    if not found:
        yield "no command"
    for command in found:
        if message := commands.check(command):
            yield f"{' '.join(command.words)}: {message}"


def read_job(block: Block) -> Iterator[str]:
    """Parse a job file, or the project file of a package with plugins."""
    parsed = tomllib.loads(block.text)
    if block.own_test:
        return
    if "project" in parsed:
        groups = {group.removeprefix("fedplat.") for group in parsed["project"]["entry-points"]}
        yield from (f"no kind of plugin is {group}" for group in sorted(groups - set(kinds())))
        return
    with tempfile.TemporaryDirectory() as folder:
        for other in read(block.page):
            if other.marker.startswith("file: "):
                Path(folder, other.marker.removeprefix("file: ")).write_text(other.text)
        own = frozenset({("rules", "lion"), ("policies", "turns"), ("codecs", "signs")})  # of --plugin
        tables = {**JOB, **parsed, "selection": {**JOB["selection"], **parsed.get("selection", {})}}
        if "procedure" in parsed:
            del tables["model"]  # its first message is the model
        parse_job(tomli_w.dumps(tables), Plugins(folder=Path(folder), absent=own))


def read_data(block: Block) -> Iterator[str]:
    """Parse JSON or YAML."""
    if not (json.loads if block.language == "json" else yaml.safe_load)(block.text):
        yield "no data"


def read_program(block: Block) -> list[str]:
    """Compile a program, and import what it imports of fedplat."""
    if block.own_test:
        return []
    for node in ast.walk(compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedplat"):
            exec(compile(ast.Module([node], []), str(block), "exec"), {})
    return []


READERS: dict[str, Callable[[Block], Iterable[str]]] = {
    "bash": read_commands,
    "console": read_commands,
    "json": read_data,
    "python": read_program,
    "toml": read_job,
    "yaml": read_data,
}


def check_own_tests(sources: Sources, blocks: list[Block]) -> Iterator[Finding]:
    """Find tests of single pages that do not exist, and rows of `OWN_TESTS` without a block."""
    used = {(block.page, key) for block in blocks for key in (block.marker, block.marker.partition(":")[0])}
    used |= {(block.page, block.language) for block in blocks if not block.marker}
    for (page, marker), test in OWN_TESTS.items():
        path, _, name = test.partition("::")
        source = sources.get(path)
        body = source.tree.body if source else []
        if name not in [node.name for node in body if isinstance(node, ast.FunctionDef)]:
            yield Finding(page, 0, f"its test {test} does not exist")
        if (page, marker) not in used:
            yield Finding(page, 0, f"it has no block {marker}, which OWN_TESTS in tests/support/docs/blocks.py names")
