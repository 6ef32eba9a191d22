"""The command `fedplat`: its global options, and the table of its commands, each imported when it is used."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import click
import typer
import typer.core
import typer.main
from typing_extensions import override

from fedplat._version import __version__
from fedplat.cli.options import AnyTimeoutOption, JsonOption


@dataclasses.dataclass(frozen=True)
class Entry:
    """A command: `module:name` of a group (a `Typer`) or of a function, what the list of commands says, its class."""

    reference: str
    text: str
    command_class: str = ""

    def load(self, name: str) -> click.Command:
        """Import the command."""
        found = _import(self.reference)
        holder = typer.Typer(rich_markup_mode=None)
        if isinstance(found, typer.Typer):
            holder.add_typer(found, name=name)
        else:
            command_class = _import(self.command_class) if self.command_class else None
            holder.command(name, cls=command_class)(found)
        return typer.main.get_group(holder).commands[name]


def _import(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


COMMANDS: Mapping[str, Entry] = {
    "status": Entry("fedplat.cli.operators:status", "Show server status."),
    "job": Entry("fedplat.cli.jobs:app", "Submit, follow and control jobs."),
    "round": Entry("fedplat.cli.round_description:app", "Describe a round of a job."),
    "model": Entry("fedplat.cli.models:app", "List and export a job's model versions."),
    "client": Entry("fedplat.cli.clients:app", "List, describe and revoke clients."),
    "enrollment": Entry("fedplat.cli.operators:enrollment_app", "Manage the tokens with which clients enroll."),
    "privacy": Entry("fedplat.cli.privacy:app", "Plan, audit and show the privacy of jobs."),
    "flower": Entry("fedplat.cli.flower:app", "Run Flower apps unchanged."),
    "simulate": Entry("fedplat.cli.simulate:simulate", "Simulate a job and its fleet in virtual time."),
    "sweep": Entry("fedplat.cli.sweep:sweep", "Simulate many configurations with several seeds, and compare them."),
    "new": Entry(
        "fedplat.cli.new:new", "Create a small project: a model, a client, a job to simulate and to submit, and tests."
    ),
    "data": Entry("fedplat.cli.data:app", "Pack training data into a few large files."),
    "conformance": Entry(
        "fedplat.cli.conformance:conformance", "Run a client, in any language, through the cases of the protocol."
    ),
    "dashboard": Entry(
        "fedplat.cli.dashboard:dashboard", "Show a server, or the run folder of a simulation, in a browser."
    ),
    "events": Entry("fedplat.cli.events:events", "Show the latest events of the server, the oldest first."),
    "audit": Entry(
        "fedplat.cli.operators:audit",
        "Show the audit log of operator actions, the latest rows last.",
        "fedplat.cli.lists:WatchableCommand",
    ),
    "webhook": Entry("fedplat.cli.events:webhook_app", "Send the server's events to HTTP addresses."),
    "operator": Entry("fedplat.cli.operators:app", "Manage the operators of the server."),
}


class CommandTree(typer.core.TyperGroup):
    """The group of all commands, whose list of names and texts imports none of them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands.update({name: click.Command(name) for name in COMMANDS})  # for suggestions
        self._loaded: dict[str, click.Command] = {}

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS and cmd_name not in self._loaded:
            self._loaded[cmd_name] = COMMANDS[cmd_name].load(cmd_name)
        return self._loaded.get(cmd_name)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.text) for name, entry in COMMANDS.items()])


typer.core.HAS_RICH = False  # else typer 0.20 escapes the brackets of plain help for Rich: "\\[default: 1]"
# No panels: usage errors are plain lines, like all other errors.
app = typer.Typer(
    cls=CommandTree,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click suggests them, too
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_set: bool) -> None:
    if is_set:
        sys.stdout.write(f"fedplat {__version__}\n")
        raise typer.Exit


@app.callback()
def options(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    profile: Annotated[
        Path | None,
        typer.Option(
            envvar="FEDPLAT_PROFILE",
            metavar="FILE",
            help="Profile with the server, its certificates and your token. Default: profile.toml in the fedplat "
            "folder of the user's configuration.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            "--server", envvar="FEDPLAT_SERVER", metavar="HOST:PORT", help="Server to use instead of the profile's."
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            envvar="FEDPLAT_CA", metavar="FILE", help="Trusted certificates (PEM) to use instead of the profile's."
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="FEDPLAT_INSECURE", help="Connect without TLS.")
    ] = False,
    as_json: JsonOption = False,
    timeout: AnyTimeoutOption = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Operate a fedplat server: submit jobs, follow them, export models.

    --server and --json may be given before or after the command; --timeout before any command. The token is read from
    the profile or from FEDPLAT_TOKEN.
    """
    from fedplat.cli.session import Settings  # not for --help

    del version  # handled by its callback
    context.obj = Settings(server, as_json, profile, ca, insecure, timeout)
