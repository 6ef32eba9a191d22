"""Blocks and commands of the documentation that `make check` (tests/style/blocks.py) refuses and accepts."""

from __future__ import annotations

import pytest

from style import blocks
from style.sources import Sources
from support.docs import commands
from support.docs.blocks import OWN_TESTS, Block


@pytest.mark.parametrize(
    ("language", "marker", "text", "message"),
    [
        ("", "not run: output", "a", "a block of no language"),
        ("ruby", "not run: output", "a", "a block of ruby"),
        ("bash", "run", "fedplat status", "no test runs <!-- run -->"),
        ("bash", "not run:", "fedplat status --al", "'--al'"),
        ("text", "", "a", "no test runs it"),
        ("console", "not run: output", "fedplat status\nnothing", "no command"),
        ("console", "not run: output", "$ fedplat status --wach", "'--wach'"),
        ("toml", "", "rounds =", "TOMLDecodeError"),
        ("toml", "", "rouns = 3", "rouns"),
        ("toml", "", "[project.entry-points.'fedplat.ruls']", "no kind of plugin is ruls"),
        ("json", "", "{", "JSONDecodeError"),
        ("yaml", "", "a: b: c", "ScannerError"),
        ("yaml", "", "# nothing", "no data"),
        ("python", "", "a b", "SyntaxError"),
        ("python", "", "from fedplat.model import Parametres", "ImportError"),
        ("python", "", "def f():\n    from fedplat.modle import Parameters", "ModuleNotFoundError"),
    ],
)
def test_a_wrong_block_is_found(language: str, marker: str, text: str, message: str) -> None:
    found = [*blocks.mistakes(Block("docs/jobs.md", 1, language, marker, text))]
    assert any(message in each for each in found), found


@pytest.mark.parametrize(
    ("language", "marker", "text"),
    [
        ("bash", "", "fedplat status"),
        ("text", "not run: output", "a"),
        ("toml", "", "rounds = 3\nselection.over_selection = 1"),
        ("json", "", '{"a": 1}'),
        ("python", "", "from fedplat.model import Parameters\nimport absent"),
    ],
)
def test_a_right_block_is_accepted(language: str, marker: str, text: str) -> None:
    assert [*blocks.mistakes(Block("docs/jobs.md", 1, language, marker, text))] == []


def test_a_test_of_a_page_that_does_not_exist_and_one_without_a_block_are_found() -> None:
    (page, marker), test = next(iter(OWN_TESTS.items()))
    path, _, name = test.partition("::")
    used = [Block(page, 1, marker, "", "")]
    there = f"its test {test} does not exist", f"it has no block {marker}, "
    for text, found_blocks, expected in (
        (f"def {name}(): pass", used, (False, False)),
        (f"class A:\n    def {name}(): pass", used, (True, False)),
        (f"def {name}(): pass", [], (False, True)),
    ):
        found = [each for each in blocks.check_own_tests(Sources({path: text}), found_blocks) if each.path == page]
        assert tuple(any(each.message.startswith(start) for each in found) for start in there) == expected


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
