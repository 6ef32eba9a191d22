"""The table of commands: what it says of each, and that its help imports none of them."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
import typer.main

from fedplat.cli.app import COMMANDS, app
from support.cli.runner import CliRunner

TREE = typer.main.get_command(app)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_has_the_text_of_each_command(name: str) -> None:
    assert isinstance(TREE, click.Group)
    command = TREE.get_command(click.Context(TREE), name)
    assert command is not None
    assert (command.name, command.get_short_help_str(200)) == (name, COMMANDS[name].text)


def test_the_help_loads_neither_grpc_nor_numpy() -> None:
    code = "import sys; from fedplat.cli.app import app; app(['--help'], standalone_mode=False); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("\n\n")[2].split())
    assert "fedplat.cli.app" in loaded
    assert loaded.isdisjoint({"grpc", "numpy", "fedplat.cli.session", "fedplat.job"})


def test_a_mistyped_command_has_one_suggestion() -> None:
    done = CliRunner().invoke(app, ["jbo"])
    assert done.exit_code == 2
    assert done.stderr.endswith("Error: No such command 'jbo'. Did you mean 'job'?\n")
