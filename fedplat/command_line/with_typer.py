"""The commands and groups of the programs that use typer: `fedplat` and `fedplat-server`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
import typer.core

from fedplat import texts
from fedplat.command_line import groups, settings

typer.core.HAS_RICH = False  # else typer 0.20 escapes the brackets of plain help for Rich: "\\[default: 1]"
# No panels: usage errors are plain lines, like all other errors.


class TyperCommands(groups.SuggestingGroup, typer.core.TyperGroup):
    """A group of commands of typer."""


class TyperConfiguredCommand(settings.ConfiguredCommand, typer.core.TyperCommand):
    """A command of typer with variables and, if it has a parameter of the type `ConfigOption`, a file."""

    error_class = typer.BadParameter


def read_duration(value: str | float) -> float:
    """Return the seconds of an option: of its text or its default. Raises `typer.BadParameter`."""
    if not isinstance(value, str):
        return value
    try:
        return texts.parse_duration(value)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


def make_group(text: str) -> typer.Typer:
    """Return an empty group of commands, described by a text."""
    return typer.Typer(cls=TyperCommands, no_args_is_help=True, help=text, rich_markup_mode=None)


def _use_file(context: typer.Context, value: Path | None) -> Path | None:
    try:
        settings.use_file(context, value)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return value


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        f"--{settings.CONFIG}",
        metavar="FILE",
        is_eager=True,
        callback=_use_file,
        help=settings.CONFIG_HELP,
    ),
]
"""The option `--config` of a `TyperConfiguredCommand`."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_version(program: str, version: str) -> None:
    """Print the line of `--version`, and exit."""
    from fedplat.command_line import about  # not for --help

    sys.stdout.write(about.format_version(program, version) + "\n")
    raise typer.Exit


def print_about(program: str, version: str, *, as_json: bool) -> None:
    """Print what `version` prints."""
    from fedplat.command_line import about  # not for --help

    sys.stdout.write(about.format_about(program, version, as_json=as_json) + "\n")
