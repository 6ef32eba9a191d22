"""Every fenced block of the documentation is run, checked, or states why no test runs it."""

from __future__ import annotations

import ast
import collections
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from fedplat.job import parse_job
from fedplat.plugins import Plugins, kinds
from support.docs import commands
from support.docs.blocks import OWN_TESTS, ROOT, Block, read, read_all

BLOCKS = read_all()
LANGUAGES = {"bash", "console", "dockerfile", "json", "python", "text", "toml", "yaml"}
JOB: dict[str, Any] = {
    "name": "digits",
    "population": "demo",
    "trainer": "digits",
    "rounds": 10,
    "model": {"initial": "model:initial"},
    "selection": {"goal": 2},
}
"""What a job file needs; the blocks of pages are parts of job files."""


def of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in BLOCKS])
def test_each_block_is_run_or_checked_or_says_why_not(block: Block) -> None:
    advice = "see 'Writing documentation' in docs/contributing.md"
    assert block.language in LANGUAGES, f"{block}: a block of {block.language or 'no language'}; {advice}"
    if block.marker:
        assert block.reason or block.own_test, f"{block}: no test runs <!-- {block.marker} -->; {advice}"
    assert block.reason or block.own_test or block.is_run_here or block.is_checked, (
        f"{block}: no test runs it; {advice}"
    )


@pytest.mark.parametrize("test", sorted(set(OWN_TESTS.values())))
def test_the_tests_of_pages_exist(test: str) -> None:
    path, _, name = test.partition("::")
    functions = [node for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in [function.name for function in functions]


def test_no_row_of_the_tests_of_pages_is_left_over() -> None:
    used = {(block.page, key) for block in BLOCKS for key in (block.marker, block.marker.partition(":")[0])}
    used |= {(block.page, block.language) for block in BLOCKS if not block.marker}
    assert set(OWN_TESTS) <= used


@pytest.mark.parametrize("block", of("bash", "console"))
def test_the_programs_accept_all_commands(block: Block) -> None:
    text = block.text
    if block.language == "console":
        text = "\n".join(line for line in text.splitlines() if line.startswith("$ "))
    found = commands.find(text)
    assert found, f"{block}: no command"
    for command in found:
        assert commands.check(command) == "", f"{block}: {' '.join(command.words)}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fedplat job submit job.toml --wach", "'--wach'"),
        ("fedplat job submti job.toml", "there is no command submti"),
        ("fedplat job submit", "Missing"),
        ("fedplat job pause a b", "unexpected argument b"),
        ("A=1 fedplat-server prune --keep-versions many # comment", "'many' is not a valid"),
        ("for i in 1 2; do fedplat-client run --labels a=b; done", "'--labels'"),
        ("docker compose -f compose.yaml exec server fedplat status --all > out", "'--all'"),
        ("fedplat job list -o name | xargs -r -n 1 fedplat job resum", "there is no command resum"),
        ("pip install 'fedplat[torhc]'", "fedplat has no extra torhc"),
        ("make demos", "there is no target demos"),
    ],
)
def test_a_wrong_command_is_found(line: str, message: str) -> None:
    assert any(message in commands.check(command) for command in commands.find(line))


@pytest.mark.parametrize("block", of("toml"))
def test_the_job_files_are_valid(block: Block, tmp_path: Path) -> None:
    parsed = tomllib.loads(block.text)
    if block.own_test:
        return
    if "project" in parsed:  # of a package with plugins
        assert {group.removeprefix("fedplat.") for group in parsed["project"]["entry-points"]} <= set(kinds())
        return
    for other in read(block.page):
        if other.marker.startswith("file: "):
            (tmp_path / other.marker.removeprefix("file: ")).write_text(other.text)
    own = frozenset({("rules", "lion"), ("policies", "turns"), ("codecs", "signs")})  # of --plugin
    plugins = Plugins(folder=tmp_path, absent=own)
    tables = {**JOB, **parsed, "selection": {**JOB["selection"], **parsed.get("selection", {})}}
    parse_job(tomli_w.dumps(tables), plugins)


@pytest.mark.parametrize("block", of("yaml", "json"))
def test_data_is_well_formed(block: Block) -> None:
    assert (json.loads if block.language == "json" else yaml.safe_load)(block.text)


@pytest.mark.parametrize("block", [case for case in of("python") if not case.values[0].own_test])
def test_programs_compile_and_import_what_exists(block: Block) -> None:
    tree = compile(block.text, str(block), "exec", ast.PyCF_ONLY_AST)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedplat"):
            exec(compile(ast.Module([node], []), str(block), "exec"), {})


def test_most_blocks_run() -> None:
    """Counts them; `pytest -rP` shows the figures."""
    states = collections.Counter(
        "executed" if block.own_test or block.is_run_here else "checked" if block.is_checked else "not run"
        for block in BLOCKS
    )
    print(dict(states))
    assert states["executed"] > states["checked"]
    assert states["executed"] + states["checked"] > 2 * states["not run"]
