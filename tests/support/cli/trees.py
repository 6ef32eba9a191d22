"""The commands of the three programs, to walk through all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import click
import typer.main


@dataclasses.dataclass(frozen=True)
class Node:
    """A command or a group: its words, such as `("fedplat", "job", "list")`."""

    words: tuple[str, ...]
    command: click.Command

    @property
    def options(self) -> list[click.Option]:
        """The options of the command."""
        found: list[Any] = [each for each in self.command.params if each.param_type_name == "option"]
        return found

    @property
    def path(self) -> str:
        """The words without the program."""
        return " ".join(self.words[1:])


@functools.cache
def load_programs() -> dict[str, click.Command]:
    """Return the roots of the three programs."""
    from fedplat.cli.app import app
    from fedplat_client.commands import main
    from fedplat_server.cli.commands import app as server

    return {
        "fedplat": typer.main.get_command(app),
        "fedplat-server": typer.main.get_command(server),
        "fedplat-client": main,
    }


def walk(program: str) -> Iterator[Node]:
    """Yield the root, its groups and all commands of a program."""
    return _walk(load_programs()[program], (program,))


def _walk(command: click.Command, words: tuple[str, ...]) -> Iterator[Node]:
    yield Node(words, command)
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from _walk(found, (*words, name))
