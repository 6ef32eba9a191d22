"""What all commands share: the options `--server` and `--json`, the connection, and errors as one line and a status.

Exit status: 0 done, 1 the server or the job says no, 2 the command line or the job file is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Annotated

import typer

from fedplat.cli.admin import DEFAULT_SERVER, AdminClient
from fedplat.cli.output import Output
from fedplat.errors import FedplatError, JobFileError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="HOST:PORT", help=f"The server; else FEDPLAT_SERVER, else {DEFAULT_SERVER}."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its name if only one job has it.")]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options that were given before the command."""

    server: str = DEFAULT_SERVER
    as_json: bool = False


@dataclasses.dataclass(frozen=True)
class Session:
    """A command's connection and its printer."""

    client: AdminClient
    output: Output


@contextlib.contextmanager
def reporting(context: typer.Context, as_json: bool) -> Generator[Output]:
    """Within it every error of fedplat ends the command with a line on stderr and an exit status."""
    output = Output(as_json or _settings(context).as_json)
    try:
        yield output
    except FedplatError as exc:
        for line in str(exc).splitlines():
            output.error(line)
        for note in getattr(exc, "__notes__", ()):
            output.note(note)
        raise typer.Exit(WRONG_USAGE if isinstance(exc, JobFileError) else FAILED) from exc


@contextlib.contextmanager
def session(context: typer.Context, server: str | None, as_json: bool) -> Generator[Session]:
    """A connection to the server that the options name; `server` and `as_json` are those after the command."""
    with reporting(context, as_json) as output:
        try:
            client = AdminClient(server or _settings(context).server)
        except ValueError as exc:
            output.error(str(exc))
            raise typer.Exit(WRONG_USAGE) from exc
        with client:
            yield Session(client, output)


def _settings(context: typer.Context) -> Settings:
    return context.find_object(Settings) or Settings()
