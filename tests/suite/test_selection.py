"""The tests that a change can reach, on a small checkout and on this one."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import pytest

from support import selection
from support.selection import Graph, choose_slow, read_graph

FILES = {
    "fedplat/__init__.py": "",
    "fedplat/rules/__init__.py": "from fedplat.rules.mean import mean\n",
    "fedplat/rules/mean.py": "import numpy\n",
    "fedplat/rules/median.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import fedplat.cli\n",
    "fedplat/cli.py": "def run():\n    from fedplat import rules\n    return rules\n",
    "fedplat/pages/app.py": "import os\n",
    "fedplat/tools/__init__.py": "def main():\n    from fedplat.tools import many\n",
    "fedplat/tools/many.py": "",
    "fedplat/tools/one.py": "",
    "fedplat/pages/static/page.css": "",
    "tests/conftest.py": "",
    "tests/core/conftest.py": "from support import boards\n",
    "tests/core/test_mean.py": "from fedplat.rules import mean\n",
    "tests/core/test_median.py": 'TARGET = "fedplat.rules.median:median"\n',
    "tests/client/test_cli.py": "from fedplat import cli\n",
    "tests/client/test_pages.py": "from fedplat.pages import app\n",
    "tests/core/test_tools.py": "from fedplat.tools import main\n",
    "tests/core/test_one.py": "from fedplat.tools import one\n",
    "tests/e2e/test_programs.py": "import subprocess\n",
    "tests/support/boards.py": "",
    "tests/support/inputs.toml": '"tests/e2e/" = ["programs", "docs/"]\n"tests/client/test_cli.py" = ["README.md"]\n',
    "docs/index.md": "",
    "README.md": "",
}
CORE, CLIENT = ("tests/core/test_mean.py", "tests/core/test_median.py"), "tests/client/test_cli.py"
PAGES, PROGRAMS = "tests/client/test_pages.py", "tests/e2e/test_programs.py"
TOOLS, ONE = "tests/core/test_tools.py", "tests/core/test_one.py"
ALL = {*CORE, CLIENT, PAGES, PROGRAMS, TOOLS, ONE}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "selected"),
    [
        ("fedplat/rules/mean.py", {*CORE, CLIENT, PROGRAMS}),  # importing the median runs the package's __init__
        ("fedplat/rules/median.py", {CORE[1], PROGRAMS}),
        ("fedplat/cli.py", {CLIENT, PROGRAMS}),  # a type checker's import is not one
        ("fedplat/pages/static/page.css", {PAGES, PROGRAMS}),
        ("fedplat/pages/removed.py", {PAGES, PROGRAMS}),
        ("fedplat/tools/__init__.py", {TOOLS, ONE, PROGRAMS}),
        ("fedplat/tools/one.py", {ONE, PROGRAMS}),
        ("fedplat/tools/many.py", {TOOLS, PROGRAMS}),  # importing the other one runs no function of the package
        ("tests/support/boards.py", {*CORE, TOOLS, ONE}),
        ("tests/core/conftest.py", {*CORE, TOOLS, ONE}),
        ("tests/core/test_mean.py", {CORE[0]}),
        ("docs/index.md", {PROGRAMS}),
        ("README.md", {CLIENT}),
        ("pyproject.toml", ALL),
        ("proto/fedplat/wire/v1/fleet.proto", ALL),
        ("tests/conftest.py", ALL),
        ("a-new-kind-of-file", ALL),
    ],
)
def test_a_change_reaches_what_depends_on_it(checkout: Path, changed: str, selected: set[str]) -> None:
    assert set(read_graph(checkout).reach([changed])) == selected


def test_changes_add_up(checkout: Path) -> None:
    graph = read_graph(checkout)
    assert graph.reach([]) == {}
    assert set(graph.reach(["README.md", "tests/core/test_mean.py"])) == {CLIENT, CORE[0]}


def test_a_test_is_as_far_as_the_nearest_change(checkout: Path) -> None:
    graph = read_graph(checkout)
    assert graph.reach(["fedplat/rules/median.py"]) == {CORE[1]: 0, PROGRAMS: 0}
    assert graph.reach(["tests/support/boards.py"]) == {CORE[0]: 1, CORE[1]: 1, TOOLS: 1, ONE: 1}  # by a conftest.py
    assert graph.reach(["tests/support/boards.py", ONE])[ONE] == 0
    everything = graph.reach(["Makefile", "README.md", CORE[0]])
    assert everything == dict.fromkeys(ALL, math.inf) | {CLIENT: 0, CORE[0]: 0}


def test_slow_tests_run_where_the_change_is_near_until_their_time_is_spent() -> None:
    reached = {"a": 0.0, "b": 3.0, "c": math.inf, "d": math.inf, "e": math.inf}
    cost = {"a": 100.0, "b": 350.0, "c": 60.0, "d": 49.0, "e": 0.0}
    assert choose_slow(reached, cost, "1") == {"a", "b", "d", "e"}  # c does not fit
    assert choose_slow({"b": 0.0}, {"b": 2 * selection.SLOW_CPU_S}, "1") == {"b"}


def test_slow_tests_that_are_equally_far_take_turns() -> None:
    reached = dict.fromkeys("abcdefgh", math.inf)
    cost = dict.fromkeys(reached, selection.SLOW_CPU_S / 2)
    turns = [choose_slow(reached, cost, str(commit)) for commit in range(40)]
    assert {len(turn) for turn in turns} == {2}
    assert set().union(*turns) == set(reached)
    assert turns[0] == choose_slow(reached, cost, "0")


def test_changes_are_those_since_the_verified_commit(checkout: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=checkout, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    assert selection.read_changes(checkout) is None  # nothing is verified
    (checkout / ".ci").mkdir()
    (checkout / ".ci/verified").write_text(git("rev-parse", "HEAD"))
    (checkout / "README.md").write_text("changed\n")
    git("mv", "fedplat/cli.py", "fedplat/commands.py")
    git("commit", "-qam", "more")
    (checkout / "new.txt").write_text("untracked\n")
    changes = selection.read_changes(checkout)
    assert changes is not None
    assert set(changes) == {"README.md", "fedplat/cli.py", "fedplat/commands.py", "new.txt"}
    (checkout / ".ci/verified").write_text("0" * 40)
    assert selection.read_changes(checkout) is None


@pytest.fixture(scope="module")
def graph() -> Graph:
    return read_graph()


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("fedplat/aggregate/server_optimizers.py", "tests/core/aggregate/test_contract.py"),
        ("server/fedplat_server/database/sql_retention.py", "tests/server/store/test_contract_retention.py"),
        ("server/fedplat_server/rpc/report_intake.py", "tests/server/test_report.py"),
        ("server/fedplat_server/crash_points.py", "tests/server/crash/test_matrix.py"),
        ("client/fedplat_client/_work/work.py", "tests/client/test_client.py"),
        ("fedplat/rounds/dispatch.py", "tests/core/rounds/test_machine.py"),
        ("fedplat/dashboard/static/dashboard.js", "tests/core/dashboard/test_pages.py"),
        ("tests/support/daemons.py", "tests/server/test_round.py"),
        ("fedplat/cli/jobs.py", "tests/e2e/test_operator.py"),
        ("fedplat/cli/sweep.py", "tests/core/cli/test_completion.py"),
        ("fedplat/admin/client.py", "tests/e2e/test_killed.py"),
        ("server/fedplat_server/rpc/report_intake.py", "tests/e2e/test_killed.py"),
        ("client/fedplat_client/commands.py", "tests/e2e/test_silos.py"),
        ("fedplat/dashboard/app.py", "tests/e2e/test_dev.py"),
    ],
)
def test_a_change_of_this_checkout_reaches_its_tests(graph: Graph, changed: str, test: str) -> None:
    assert test in graph.reach([changed])


def test_a_leaf_reaches_few_tests(graph: Graph) -> None:
    assert len(graph.reach(["fedplat/sweep/schedule.py"])) < len(graph.tests) / 6
