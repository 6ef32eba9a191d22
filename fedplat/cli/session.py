"""What all commands share: the options, the profile, the connection, and errors as one line and a status.

Exit status: 0 done, 1 the server or the job says no, 2 the command line or the job file is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fedplat.cli import profile
from fedplat.cli.admin import AdminClient
from fedplat.cli.output import Output
from fedplat.errors import DataError, FedplatError, JobFileError, JournalError, ProfileError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="HOST:PORT", help="The server; else FEDPLAT_SERVER, else the profile's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
LimitOption = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="At most so many rows; else all.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its name if only one job has it.")]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options that were given before the command."""

    server: str | None = None
    as_json: bool = False
    profile: Path | None = None
    ca: Path | None = None
    insecure: bool = False

    def resolve(self, server: str | None) -> profile.Profile:
        """The profile with what the command line and the environment say instead. Raises `ProfileError`."""
        path = self.profile if self.profile is not None else profile.default_path()
        named = self.profile is not None or path.exists()
        found = profile.load(path) if named else profile.Profile()
        changes: dict[str, Any] = {}
        if server or self.server:
            changes["server"] = server or self.server
        if self.ca is not None:
            changes["ca"] = profile.load_ca(self.ca)
        if self.insecure:
            changes["insecure"] = True
        if token := os.environ.get("FEDPLAT_TOKEN"):
            changes["token"] = token
        if not named and not token:
            raise ProfileError(
                f"there is no operator's profile {path}; put one there, or name it with --profile FILE or "
                "FEDPLAT_PROFILE. On the server's machine fedplat-server init makes the first one (DATA_DIR/admin.toml)"
            )
        return msgspec.structs.replace(found, **changes)


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
        raise typer.Exit(
            WRONG_USAGE if isinstance(exc, JobFileError | ProfileError | DataError | JournalError) else FAILED
        ) from exc


@contextlib.contextmanager
def session(context: typer.Context, server: str | None, as_json: bool) -> Generator[Session]:
    """A connection to the server that the options name; `server` and `as_json` are those after the command."""
    with reporting(context, as_json) as output:
        try:
            client = AdminClient(_settings(context).resolve(server))
        except ValueError as exc:
            output.error(str(exc))
            raise typer.Exit(WRONG_USAGE) from exc
        with client:
            yield Session(client, output)


def _settings(context: typer.Context) -> Settings:
    return context.find_object(Settings) or Settings()
