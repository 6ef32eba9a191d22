"""The fenced blocks of the documentation, and which test runs each.

A comment on the line above a block describes it: `<!-- file: NAME -->` for a file, `<!-- not run: REASON -->` for a
block that no test runs. docs/contributing.md describes the rules.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from support.docs import commands

ROOT = Path(__file__).resolve().parents[3]
FENCE = re.compile(r"^( *)(`{3,})(\S*)$")
MARKER = re.compile(r"^ *<!-- (.+) -->$")

OWN_TESTS = {
    ("README.md", "bash"): "tests/e2e/test_readme.py::test_one_machine",
    ("README.md", "file"): "tests/e2e/test_readme.py::test_one_machine",
    ("README.md", "python"): "tests/e2e/test_readme.py::test_the_simulation_of_the_readme",
    ("docs/procedures.md", "file: columns.toml"): (
        "tests/core/tables/test_dictionary.py::test_the_dictionary_of_the_docs_is_one"
    ),
    (
        "docs/docker.md",
        "dockerfile",
    ): "tests/e2e/test_docker_files.py::test_trainer_of_the_docs_trains_the_job_of_the_docs",
    ("docs/coming-from.md", "file"): "tests/docs/test_coming_from.py::test_its_job_runs",
    ("docs/docker.md", "python"): "tests/e2e/test_docker_files.py::test_trainer_of_the_docs_trains_the_job_of_the_docs",
    ("docs/docker.md", "toml"): "tests/e2e/test_docker_files.py::test_trainer_of_the_docs_trains_the_job_of_the_docs",
    (
        "docs/extending.md",
        "file",
    ): "tests/core/simulation/test_extending_page.py::test_its_plugins_learn_to_read_digits",
    ("docs/extending.md", "message"): (
        "tests/core/simulation/test_extending_page.py::test_its_message_is_the_one_that_is_printed"
    ),
    ("docs/flower.md", "bash"): "tests/e2e/test_flower_page.py::test_the_commands_of_the_page",
    ("docs/flower.md", "file"): "tests/e2e/test_flower_page.py::test_the_commands_of_the_page",
    ("docs/flower.md", "python"): "tests/e2e/test_flower_page.py::test_the_commands_of_the_page",
    ("docs/language-models.md", "file"): (
        "tests/core/learners/test_huggingface.py::test_the_files_of_the_page_train_a_model"
    ),
    ("docs/learners.md", "file"): "tests/core/learners/test_page.py::test_its_estimator_learns_to_read_digits",
    ("docs/machines.md", "bash"): "tests/e2e/test_readme.py::test_two_machines",
    ("docs/machines.md", "file"): "tests/e2e/test_readme.py::test_two_machines",
    ("docs/operations.md", "file: prometheus.yml"): (
        "tests/server/metrics/test_documentation.py::test_the_configuration_of_prometheus_is_valid"
    ),
    ("docs/operations.md", "file: receiver.py"): "tests/e2e/test_operator.py::test_the_receiver_of_the_page_runs",
    ("docs/packed-data.md", "file"): "tests/core/packed/test_page.py::test_its_code_runs",
    ("docs/packed-data.md", "pack"): "tests/core/packed/test_page.py::test_its_code_runs",
    ("docs/packed-data.md", "train"): "tests/core/packed/test_page.py::test_its_code_runs",
    ("docs/procedures.md", "bash"): (
        "tests/e2e/test_procedures_page.py::test_its_five_sites_have_the_numbers_of_the_pooled_table"
    ),
    ("docs/procedures.md", "file"): (
        "tests/e2e/test_procedures_page.py::test_its_five_sites_have_the_numbers_of_the_pooled_table"
    ),
    ("docs/runbook.md", "bash"): "tests/docs/test_runbook.py::test_every_command_runs",
    ("docs/simulation.md", "bash"): "tests/e2e/test_readme.py::test_simulations",
    ("docs/simulation.md", "data"): (
        "tests/core/simulation/test_data_files.py::test_a_simulation_learns_from_each_source_on_the_page"
    ),
    ("docs/simulation.md", "python"): "tests/core/simulation/test_simulation_page.py::test_its_code_runs",
    ("docs/sweeps.md", "code"): "tests/core/sweep/test_sweeps_page.py::test_its_code_runs",
    ("docs/sweeps.md", "file"): "tests/core/sweep/test_sweeps_page.py::test_its_files_are_valid",
}
"""The tests of single pages: which blocks they run, by their marker, by its first word, or by the language."""


@dataclasses.dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    marker: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str:
        """Why no test runs it; "" if a test has to."""
        return self.marker.removeprefix("not run:").strip() if self.marker.startswith("not run:") else ""

    @property
    def own_test(self) -> str:
        """The test of its page that runs it; or "" without one."""
        keys = (self.marker, self.marker.partition(":")[0]) if self.marker else (self.language,)
        return next((OWN_TESTS[self.page, key] for key in keys if (self.page, key) in OWN_TESTS), "")

    @property
    def is_run_here(self) -> bool:
        """Whether tests/docs/test_run_blocks.py runs it."""
        return not self.marker and not self.own_test and self.language in ("bash", "python") and not self.only_installs

    @property
    def only_installs(self) -> bool:
        """Whether all commands are of pip and make: what they name is checked, and installing takes minutes."""
        found = commands.find(self.text) if self.language == "bash" else []
        return bool(found) and all(command.words[0] in ("pip", "make") for command in found)

    @property
    def is_checked(self) -> bool:
        """Whether a parser of fedplat reads all of it."""
        if self.language == "bash":
            return all(command.program for command in commands.find(self.text))
        return self.language in ("toml", "yaml", "json", "python")


def pages() -> list[str]:
    """Names all pages whose blocks are tested."""
    folders = ("docs", "examples", "skills")
    found = [ROOT / "README.md", *(path for folder in folders for path in (ROOT / folder).rglob("*.md"))]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read(page: str) -> Iterator[Block]:
    """Yields the blocks of a page, without the indentation of their fences."""
    lines = (ROOT / page).read_text("utf-8").splitlines()
    numbered = iter(enumerate(lines))
    for number, line in numbered:
        if (fence := FENCE.match(line)) is None:
            continue
        indent, ticks, language = fence.groups()
        inside: list[str] = []
        for _, each in numbered:
            if each.strip() == ticks:
                break
            inside.append(each.removeprefix(indent))
        else:
            raise AssertionError(f"{page}:{number + 1}: the block has no end")
        marker = MARKER.match(lines[number - 1]) if number else None
        yield Block(page, number + 1, language, marker[1] if marker else "", "\n".join(inside) + "\n")


def read_all() -> list[Block]:
    """Reads the blocks of all pages."""
    return [block for page in pages() for block in read(page)]


def replace_code(text: str) -> str:
    """Returns a page without its blocks and inline code, which have no links; lines keep their numbers."""
    text = re.sub(
        r"^ *(`{3,}).*?^ *\1$", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`\n]*`", "`", text)
