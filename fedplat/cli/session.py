"""What all commands share: the options, the profile, the connection, and errors as one line and a status.

Exit status: 0 done, 1 the server or the job says no, 2 the command line or the job file is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fedplat.admin import AdminClient, profile
from fedplat.cli.output import Output
from fedplat.cli.patience import DEFAULT_TIMEOUT_S, Patience
from fedplat.errors import DataError, FedplatError, JobFileError, JournalError, ProfileError, UserCodeError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
_USAGE_ERRORS = (JobFileError, UserCodeError, ProfileError, DataError, JournalError)

ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="HOST:PORT", help="The server; else FEDPLAT_SERVER, else the profile's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
LimitOption = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="At most so many rows; else all.")]


def _finite(seconds: float | None) -> float | None:
    if seconds is not None and not 0.0 <= seconds < math.inf:
        raise typer.BadParameter(f"{seconds:g}: expected a number of seconds, 0 or more")
    return seconds


TimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        callback=_finite,
        help="How long to try again while the server cannot be reached (a name that is not known, a refused "
        f"connection, no leader). Default: {DEFAULT_TIMEOUT_S:g}.",
    ),
]
StatusTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout", metavar="SECONDS", callback=_finite, help="How long to wait for the server to answer. Default: 0."
    ),
]
AnyTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        callback=_finite,
        help=f"How long to wait for the server to answer. Default: {DEFAULT_TIMEOUT_S:g} for job submit and job watch, "
        "0 for all other commands.",
    ),
]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or its name if only one job has it.")]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options that were given before the command."""

    server: str | None = None
    as_json: bool = False
    profile: Path | None = None
    ca: Path | None = None
    insecure: bool = False
    timeout_s: float | None = None

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
class CommandSession:
    """A command's connection and its printer, and how long it tries again."""

    client: AdminClient
    output: Output
    patience: Patience


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
        raise typer.Exit(WRONG_USAGE if isinstance(exc, _USAGE_ERRORS) else FAILED) from exc


@contextlib.contextmanager
def session(
    context: typer.Context, server: str | None, as_json: bool, timeout_s: float | None = None
) -> Generator[CommandSession]:
    """A connection to the server that the options name; `server` and `as_json` are those after the command.

    A command that tries again by itself gives `timeout_s`, from `own_timeout_s`. Any other one begins when the server
    has answered, within the global --timeout, and is not repeated.
    """
    with reporting(context, as_json) as output:
        settings = _settings(context)
        try:
            client = AdminClient(settings.resolve(server))
        except ValueError as exc:
            output.error(str(exc))
            raise typer.Exit(WRONG_USAGE) from exc
        with client:
            wait_s = settings.timeout_s or 0.0
            patience = Patience(wait_s if timeout_s is None else timeout_s, output.note)
            if timeout_s is None and wait_s:
                patience.run(client, client.status)
            yield CommandSession(client, output, patience)


def own_timeout_s(context: typer.Context, given: float | None, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Return the --timeout after the command, else the one before it, else the command's own."""
    if given is not None:
        return given
    before = _settings(context).timeout_s
    return default_s if before is None else before


def _settings(context: typer.Context) -> Settings:
    return context.find_object(Settings) or Settings()
