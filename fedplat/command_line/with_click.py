"""The commands and groups of the program that uses click alone: `fedplat-client`."""

from __future__ import annotations

from pathlib import Path

import click

from fedplat.command_line import groups, settings


class ClickConfiguredCommand(settings.ConfiguredCommand, click.Command):
    """A command of click with variables and a file; it has the option `config_option`."""

    error_class = click.BadParameter


class ClickCommands(groups.SuggestingGroup, click.Group):
    """A group of such commands."""

    command_class = ClickConfiguredCommand


def _use_file(context: click.Context, _: click.Parameter, value: Path | None) -> None:
    try:
        settings.use_file(context, value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


config_option = click.option(
    f"--{settings.CONFIG}",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=_use_file,
    help=settings.CONFIG_HELP,
)
"""The option `--config` of a `ClickConfiguredCommand`."""
