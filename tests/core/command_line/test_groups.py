"""Groups of commands: suggestions, and the old names of options."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from fedplat.command_line import groups

RENAMED = {"job list": {"--status": "--state"}, "run": {"-o": "--dir", "--output": "--dir", "--watch": "--follow"}}


class Program(groups.SuggestingGroup, click.Group):
    renamed = RENAMED


@click.group(cls=Program)
@click.option("--json", "as_json", is_flag=True)
def program(as_json: bool) -> None:
    """Take options."""


@program.command()
@click.option("--dir", "folder")
@click.option("--follow", is_flag=True)
@click.option("--json", "as_json", is_flag=True)
@click.argument("rest", nargs=-1)
def run(folder: str, follow: bool, as_json: bool, rest: tuple[str, ...]) -> None:
    """Print what was given."""
    click.echo(f"{folder} {follow} {rest}")


@program.group(cls=Program)
def job() -> None:
    """Hold the command."""


@job.command("list")
@click.option("--state")
@click.option("--output", "-o", "form")
@click.option("--search")
def list_jobs(state: str, form: str, search: str) -> None:
    """Print what was given."""
    click.echo(f"{state} {form} {search}")


@pytest.mark.parametrize("given", [("-o", "x"), ("-ox",), ("--output", "x"), ("--output=x",)])
def test_old_names_work_with_one_line_that_json_does_not_have(given: tuple[str, ...]) -> None:
    result = CliRunner().invoke(program, ["run", *given, "--watch", "--", "--output"])
    assert result.stdout == "x True ('--output',)\n"
    old = "-o" if given[0].startswith("-o") else "--output"
    assert result.stderr == (
        f"warning: {old} is now --dir; the old name works until 0.3\n"
        "warning: --watch is now --follow; the old name works until 0.3\n"
    )
    for silent in (["run", *given, "--json"], ["--json", "run", *given]):
        assert CliRunner().invoke(program, silent).output == "x False ()\n"


@pytest.mark.parametrize(
    ("given", "is_json"),
    [
        (["-o", "json"], True),
        (["-ojsonl"], True),
        (["--output=json"], True),
        (["--output", "table", "--search", "json"], False),
        (["--search", "--json"], False),
        (["--search", "x"], False),
        (["--search"], False),
    ],
)
def test_only_the_option_of_the_format_asks_for_json(given: list[str], is_json: bool) -> None:
    result = CliRunner().invoke(program, ["job", "list", "--status", "x", *given])
    assert ("warning" in result.stderr) is not is_json
    named = CliRunner().invoke(program, ["run", "--watch", "json"])  # a word, not an option
    assert named.stderr == "warning: --watch is now --follow; the old name works until 0.3\n"
    assert named.stdout == "None True ('json',)\n"


def test_old_names_of_other_commands_are_left_alone() -> None:
    assert groups.rename_options(["job", "show", "--status"], RENAMED) == (["job", "show", "--status"], [])
    assert groups.rename_options(["job", "list", "--status", "--status=x"], RENAMED)[0] == [
        *("job", "list", "--state", "--state=x")
    ]


def test_a_mistyped_command_has_one_suggestion() -> None:
    result = CliRunner().invoke(program, ["rn"])
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, "Error: No such command 'rn'. Did you mean 'run'?")
    assert CliRunner().invoke(program, ["zz"]).stderr.endswith("Error: No such command 'zz'.\n")
