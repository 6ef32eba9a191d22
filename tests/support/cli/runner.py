"""Commands in this process."""

from __future__ import annotations

import functools
from typing import Any

import click
import typer
from click.testing import CliRunner as ClickRunner
from click.testing import Result
from typing_extensions import override

_command_of = functools.cache(typer.main.get_command)


class CliRunner(ClickRunner):
    """Runs the commands of an app; unlike Typer's own runner, which builds all of them again for each call."""

    @override
    def invoke(self, cli: typer.Typer | click.Command, *args: Any, **options: Any) -> Result:
        return super().invoke(_command_of(cli) if isinstance(cli, typer.Typer) else cli, *args, **options)
