"""The command `fedplat`: its global options, and the table of its commands, each imported when it is used."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import click
import typer
import typer.main
from typing_extensions import override

from fedplat._version import __version__
from fedplat.cli.options import AUTO, AnyTimeoutOption, JsonOption, TransportOption
from fedplat.command_line import settings
from fedplat.command_line.groups import HELP_SETTINGS
from fedplat.command_line.with_typer import TyperCommands, print_about, print_version


@dataclasses.dataclass(frozen=True)
class Entry:
    """A command: `module:name` of a group (a `Typer`) or of a function, what the list of commands says, its class.

    `section` is the part of the list in which it is.
    """

    section: str
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


RESEARCH, JOBS, FLEET, SERVER = "Research", "Jobs", "Fleet", "Server"
COMMANDS: Mapping[str, Entry] = {
    "new": Entry(
        RESEARCH,
        "fedplat.cli.new:new",
        "Create a small project: a model, a client, a job to simulate and to submit, and tests.",
    ),
    "simulate": Entry(RESEARCH, "fedplat.cli.simulate:simulate", "Simulate a job and its fleet in virtual time."),
    "sweep": Entry(
        RESEARCH, "fedplat.cli.sweep:sweep", "Simulate many configurations with several seeds, and compare them."
    ),
    "flower": Entry(RESEARCH, "fedplat.cli.flower:app", "Run Flower apps unchanged."),
    "data": Entry(RESEARCH, "fedplat.cli.data:app", "Pack training data into a few large files."),
    "dashboard": Entry(
        RESEARCH, "fedplat.cli.dashboard:dashboard", "Show a server, or the run folder of a simulation, in a browser."
    ),
    "job": Entry(JOBS, "fedplat.cli.jobs:app", "Submit, follow and control jobs."),
    "round": Entry(JOBS, "fedplat.cli.round_description:app", "Describe a round of a job."),
    "model": Entry(JOBS, "fedplat.cli.models:app", "List and export a job's model versions."),
    "privacy": Entry(JOBS, "fedplat.cli.privacy:app", "Plan, audit and show the privacy of jobs."),
    "client": Entry(FLEET, "fedplat.cli.clients:app", "List, describe and revoke clients."),
    "enrollment": Entry(FLEET, "fedplat.cli.operators:enrollment_app", "Manage the tokens with which clients enroll."),
    "conformance": Entry(
        FLEET,
        "fedplat.cli.conformance:conformance",
        "Run a client, in any language, through the cases of the protocol.",
    ),
    "status": Entry(SERVER, "fedplat.cli.operators:status", "Show server status."),
    "events": Entry(SERVER, "fedplat.cli.events:events", "Show the latest events of the server, the oldest first."),
    "audit": Entry(
        SERVER,
        "fedplat.cli.operators:audit",
        "Show the audit log of operator actions, the latest rows last.",
        "fedplat.cli.lists:WatchableCommand",
    ),
    "context": Entry(SERVER, "fedplat.cli.contexts:app", "Name the servers that you operate, and choose one."),
    "webhook": Entry(SERVER, "fedplat.cli.events:webhook_app", "Send the server's events to HTTP addresses."),
    "operator": Entry(SERVER, "fedplat.cli.operators:app", "Manage the operators of the server."),
    "version": Entry(SERVER, "fedplat.cli.app:version", "Show the versions of fedplat, Python and the protocol."),
}


_FOLDER = {"--output": "--dir", "-o": "--dir"}


class CommandTree(TyperCommands):
    """The group of all commands, whose list of names and texts imports none of them."""

    renamed = {  # noqa: RUF012 -- a constant
        "job list": {"--status": "--state"},
        "job submit": {"--watch": "--follow"},
        "events": {"--number": "--limit"},
        "simulate": {**_FOLDER, "--checkpoint-s": "--checkpoint-every"},
        "sweep": {**_FOLDER, "--checkpoint-s": "--checkpoint-every"},
        "flower run": {**_FOLDER, "--watch": "--follow", "--no-watch": "--no-follow"},
        "model export": {"--output": "--to", "--version": "--model-version"},
        "data pack": {"--out": "--dir"},
        "operator add": {"--out": "--to"},
    }

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._loaded: dict[str, click.Command] = {}

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS and cmd_name not in self._loaded:
            self._loaded[cmd_name] = COMMANDS[cmd_name].load(cmd_name)
        return self._loaded.get(cmd_name)

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for section in dict.fromkeys(entry.section for entry in COMMANDS.values()):
            rows = [(name.ljust(width), entry.text) for name, entry in COMMANDS.items() if entry.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=CommandTree,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={**HELP_SETTINGS},
)


def _print_version(is_set: bool) -> None:
    if is_set:
        print_version("fedplat", __version__)


def version(context: typer.Context, as_json: JsonOption = False) -> None:
    """Show the versions of fedplat, Python and the protocol."""
    before = context.find_root().params.get("as_json", False)
    print_about("fedplat", __version__, as_json=as_json or before)


def _complete_contexts(incomplete: str) -> list[tuple[str, str]]:
    from fedplat.cli.contexts import complete_contexts  # not for --help

    return complete_contexts(incomplete)


@app.callback()
def options(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    profile: Annotated[
        Path | None,
        typer.Option(
            envvar="FEDPLAT_PROFILE",
            metavar="FILE",
            help="Profile with the server, its certificates and your token. Default: that of the context.",
        ),
    ] = None,
    context_name: Annotated[
        str | None,
        typer.Option(
            "--context",
            envvar="FEDPLAT_CONTEXT",
            metavar="NAME",
            help="Stored profile of this name. Default: that of fedplat context use, or default: profile.toml in the "
            "fedplat folder of the user's configuration.",
            autocompletion=_complete_contexts,
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
    transport: TransportOption = AUTO,
    as_json: Annotated[bool, typer.Option("--json", envvar="FEDPLAT_JSON", help="Print JSON.")] = False,
    timeout: AnyTimeoutOption = None,
    show_version: Annotated[
        bool,
        typer.Option("--version", "-V", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Operate a fedplat server: submit jobs, follow them, export models.

    --server and --json may be given before or after the command; --timeout before any command. The token is read from
    the profile or from FEDPLAT_TOKEN.
    """
    from fedplat.cli.session import Settings  # not for --help

    del show_version  # handled by its callback
    if profile is not None and context_name is not None:
        ranks = {name: settings.rank(context, name) for name in ("profile", "context_name")}
        if ranks["profile"] == ranks["context_name"]:
            raise typer.BadParameter(
                "--profile names a file and --context a stored profile; expected only one of them, or of "
                "FEDPLAT_PROFILE and FEDPLAT_CONTEXT"
            )
        profile, context_name = (profile, None) if ranks["profile"] < ranks["context_name"] else (None, context_name)
    context.obj = Settings(server, as_json, profile, context_name, ca, insecure, timeout, transport)
