"""Common parts of all commands: options, profile, connection, and errors as one line and an exit status.

Exit status: 0 success, 1 refused by the server or failed job, 2 wrong command line or job file, 130 Ctrl-C.
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
from fedplat.errors import DataError, FedplatError, JobFileError, ProfileError, ReplayError, UserCodeError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130
_USAGE_ERRORS = (JobFileError, UserCodeError, ProfileError, DataError, ReplayError)

ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="HOST:PORT", help="Server to use. Default: FEDPLAT_SERVER, then the profile's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LimitOption = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Maximum number of rows.")]


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
        help="How long to retry while the server cannot be reached (unknown host name, refused connection, no "
        f"leader). Default: {DEFAULT_TIMEOUT_S:g}.",
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
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, or its name if it is unique.")]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options given before the command."""

    server: str | None = None
    as_json: bool = False
    profile: Path | None = None
    ca: Path | None = None
    insecure: bool = False
    timeout_s: float | None = None

    def resolve(self, server: str | None) -> profile.Profile:
        """Return the profile, overridden by the command line and the environment. Raises `ProfileError`."""
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
                f"there is no profile at {path}; expected one there, or --profile FILE or FEDPLAT_PROFILE. "
                "fedplat-server init writes the first profile on the server's machine (DATA_DIR/admin.toml)"
            )
        return msgspec.structs.replace(found, **changes)


@dataclasses.dataclass(frozen=True)
class CommandSession:
    """A command's connection, output and retry limit."""

    client: AdminClient
    output: Output
    patience: Patience


@contextlib.contextmanager
def reporting(context: typer.Context, as_json: bool) -> Generator[Output]:
    """End the command with one line per error on stderr and an exit status if fedplat raises an error."""
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
    """Connect to the server that the options name; `server` and `as_json` are those given after the command.

    A command that retries on its own passes `timeout_s`, from `own_timeout_s`. Other commands begin when the server has
    answered, within the global --timeout, and are not repeated.
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


def own_timeout_s(context: typer.Context, timeout_s: float | None, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Return the --timeout given after the command, or the one given before it, or the command's default."""
    if timeout_s is not None:
        return timeout_s
    before = _settings(context).timeout_s
    return default_s if before is None else before


def _settings(context: typer.Context) -> Settings:
    return context.find_object(Settings) or Settings()
