"""What all commands of the three programs have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fedplat._version import __version__
from fedplat.command_line import settings
from support.cli import trees

PROGRAMS = ("fedplat", "fedplat-server", "fedplat-client")
DAEMONS = [("fedplat-server", "run"), ("fedplat-client", "run"), ("fedplat-client", "flower")]
WITHOUT_FILE = ["dev", "init", "prune", "pool run"]
"""Commands of `fedplat-server` whose options are variables only."""
pytestmark = pytest.mark.slow  # they import all commands; tests/core/command_line covers the mechanisms


def invoke(program: str, *arguments: str) -> Any:
    return CliRunner().invoke(trees.load_programs()[program], [*arguments], prog_name=program)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_command_has_both_names_of_help(program: str) -> None:
    for node in trees.walk(program):
        short, long = (invoke(program, *node.words[1:], flag) for flag in ("-h", "--help"))
        assert short.exit_code == 0, node.words
        assert short.output == long.output
        assert short.output.startswith(f"Usage: {' '.join(node.words)} ")


@pytest.mark.parametrize("program", PROGRAMS)
def test_versions_are_printed_in_one_form(program: str) -> None:
    for flag in ("-V", "--version"):
        assert invoke(program, flag).output == f"{program} {__version__}\n"
    found = json.loads(invoke(program, "version", "--json").output)
    assert (found["program"], found["version"], found["protocol"]) == (program, __version__, 1)
    assert found["extras"]["torch"] is True
    lines = invoke(program, "version").output.splitlines()
    assert lines[0] == f"{program} {__version__}"
    assert lines[2:3] == ["protocol  1"]
    assert "torch" in lines[3]


@pytest.mark.parametrize(("program", "group"), [("fedplat", "job"), ("fedplat-server", "db")])
def test_a_suggestion_is_made_once(program: str, group: str) -> None:
    wrong = {"job": "shw", "db": "upgrad"}[group]
    right = {"job": "show", "db": "upgrade"}[group]
    result = invoke(program, group, wrong)
    assert result.exit_code == 2
    assert result.output.count("Did you mean") == 1
    assert f"'{right}'" in result.output


def sample(option: click.Option) -> Any:
    """Return a value of an option, as the file of `--config` has it."""
    if option.is_flag:
        return True
    if isinstance(option.type, click.Choice):
        return str(option.type.choices[-1]).lower()
    if option.type.name.startswith("integer"):
        return 9
    if option.type.name.startswith("float"):
        return 0.75
    words = {"log-level": "ERROR", "cache-limit": "3GiB"}
    if isinstance(option.type, click.Path) and option.type.exists:
        return __file__
    return words.get(settings.name_of(option), "15" if option.metavar == "DURATION" else "a-b")


@pytest.mark.parametrize(("program", "name"), DAEMONS)
def test_each_option_of_a_daemon_is_a_variable_and_a_key_of_a_file(program: str, name: str, tmp_path: Path) -> None:
    root = trees.load_programs()[program]
    assert isinstance(root, click.Group)
    assert len(check_variables(root, root.commands[name], tmp_path / "options.toml")) > 20


@pytest.mark.parametrize("name", WITHOUT_FILE)
def test_the_other_commands_of_a_server_have_variables(name: str) -> None:
    root = command = trees.load_programs()["fedplat-server"]
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.commands[word]
    assert isinstance(root, click.Group)
    variables = check_variables(root, command, None)
    others = {*(f"FEDPLAT_POOL_{each}" for each in ("HOSTS", "ADDRESS"))} if name == "pool run" else set[str]()
    assert others <= variables
    assert not variables & {"FEDPLAT_YES", "FEDPLAT_DRY_RUN", "FEDPLAT_PORT", "FEDPLAT_INSECURE"}


def check_variables(root: click.Group, command: click.Command, file: Path | None) -> set[str]:
    """Check that each option has the same value by all ways; return the variables."""
    name = command.name or ""
    options = [each for each in settings.list_options(command) if settings.name_of(each) != settings.CONFIG]
    variables = [settings.list_variables(each)[0] for each in options]
    assert len(set(variables)) == len(options)
    arguments = ["app"] if name == "flower" else []
    for option, variable in zip(options, variables, strict=True):
        key, value = settings.name_of(option), sample(option)
        assert variable.startswith("FEDPLAT_")
        given = [f"--{key}"] if option.is_flag else [f"--{key}", str(value)]
        ways: list[tuple[list[str], dict[str, str]]] = [(given, {}), ([], {variable: str(value)})]
        if file is not None:
            file.write_text(f"{key} = {json.dumps([value] if option.multiple else value)}\n")
            file.chmod(0o600)
            ways.append((["--config", str(file)], {}))
        found: list[object] = []
        for words, environment in ways:
            with CliRunner(env=environment).isolation(env=environment):
                context = command.make_context(name, [*words, *arguments], parent=click.Context(root))
            found.append(context.params[option.name or ""])
        assert found[0] == found[1] == found[-1] != option.default, key
    return {*variables}


def test_each_option_before_a_command_of_fedplat_has_a_variable() -> None:
    root = next(trees.walk("fedplat"))
    asked_once = {"show_version", "install_completion", "show_completion", "help"}
    for option in root.options:
        assert option.name in asked_once or str(option.envvar).startswith("FEDPLAT_"), option.name


LISTS = {"job rounds", "job assignments", "client assignments", "webhook deliveries", "events", "audit"}
"""The lists that are not named `list`."""
OF_TIME = {"job list", "events", "audit"}
"""The lists with --since: of what has a time by which the server, or the order of the rows, selects."""


def test_lists_have_the_same_options() -> None:
    nodes = {node.path: node for node in trees.walk("fedplat")}
    assert nodes.keys() >= LISTS
    for path in LISTS | {path for path in nodes if path.endswith(" list")}:
        known = {name for option in nodes[path].options for name in option.opts}
        expected = {"--output", "-o", "--json", "--limit", "-n"} | ({"--since"} if path in OF_TIME else set())
        assert expected <= known, path
        assert ("--follow" in known) is (path in {"events", "audit"}), path


def test_the_list_of_commands_has_its_topics_in_order() -> None:
    lines = invoke("fedplat", "--help").output.splitlines()
    assert [line for line in lines if line in ("Research:", "Jobs:", "Fleet:", "Server:")] == [
        *("Research:", "Jobs:", "Fleet:", "Server:")
    ]


@pytest.mark.parametrize(
    ("program", "shell"),
    [("fedplat", "bash"), ("fedplat-server", "zsh"), ("fedplat-client", "bash"), ("fedplat-client", "fish")],
)
def test_each_program_completes_its_commands(program: str, shell: str) -> None:
    """As the script asks that the program itself prints for a shell."""
    variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
    is_click = program == "fedplat-client"  # typer names the instruction the other way round
    instruction = f"{shell}_complete" if is_click else f"complete_{shell}"
    words = f"{program} ver"
    asked = {
        variable: instruction,
        "_TYPER_COMPLETE_ARGS": words,
        "COMP_WORDS": words,
        "COMP_CWORD": "ver" if shell == "fish" else "1",  # fish names the word, the others its position
    }
    done = subprocess.run(
        [Path(sys.executable).parent / program],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "version" in done.stdout


TWO_FORMS = {
    "--client": "`conformance` runs the command of a client, and `job assignments` names one",
    "--tensorboard": "a simulation has a folder for its events, and `job watch` has none",
    "--state": "clients and jobs have different states",
    "--to": "a model is exported to a file, or in other formats to a folder",
}
"""Options that are not written in one way, and why."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_option_has_two_meanings(program: str) -> None:
    """A name has one form of values in all commands, and a letter stands for one name."""
    forms: dict[str, tuple[object, ...]] = {}
    for node in trees.walk(program):
        for option in node.options:
            form = (option.is_flag, option.is_flag or option.metavar or option.type.name.split()[0])
            for name in option.opts:
                found = forms.setdefault(name, form)
                assert found == form or name in TWO_FORMS, (node.words, name, found, form)
            if option.name == "form" and "--output" in option.opts:
                assert option.opts == ["--output", "-o"]
    assert forms.get("-n", (False, "N")) == (False, "N")


@pytest.mark.parametrize("program", PROGRAMS[:2])
def test_old_names_are_those_of_options_that_are_there(program: str) -> None:
    """Each old name is free, and the new one exists; test_groups.py shows that they are replaced."""
    root: Any = trees.load_programs()[program]
    nodes = {node.path: node for node in trees.walk(program)}
    page = (Path(__file__).parents[2] / "docs" / "upgrading.md").read_text()
    for path, names in root.renamed.items():
        known = {name for option in nodes[path].options for name in (*option.opts, *option.secondary_opts)}
        for old, new in names.items():
            assert new in known, (path, new)
            assert old not in known, (path, old)
            rows = [line for line in page.splitlines() if f"`{program} {path}`" in line]
            assert any(f"`{old}" in row and f"`{new}" in row for row in rows), (path, old)


def test_the_reference_is_up_to_date() -> None:
    """`make cli-reference` writes it."""
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [sys.executable, str(root / "docs" / "site" / "cli_reference.py")], capture_output=True, text=True, check=True
    )
    assert made.stdout == (root / "docs" / "cli.md").read_text()
