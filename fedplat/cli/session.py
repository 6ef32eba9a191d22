"""Common parts of all commands: options, profile, connection, and errors as one line and an exit status.

Exit status: 0 success, 1 refused by the server or failed job, 2 wrong command line or job file, 3 the time of
`fedplat job wait` is over, 4 not logged in or not allowed, 5 the server cannot be reached, 130 Ctrl-C.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Generator
from typing import Annotated

import typer

from fedplat import texts
from fedplat.admin import AdminClient
from fedplat.admin.patience import DEFAULT_TIMEOUT_S, Patience
from fedplat.cli import completion
from fedplat.cli.output import Output, OutputFormat
from fedplat.cli.settings import Settings
from fedplat.errors import (
    DataError,
    FedplatError,
    JobFileError,
    MissingProfileError,
    ProfileError,
    ReplayError,
    ServerRefusedError,
    ServerUnreachableError,
    TrackerError,
    UserCodeError,
)

FAILED, WRONG_USAGE, TIMED_OUT, NOT_ALLOWED, UNREACHABLE, INTERRUPTED = 1, 2, 3, 4, 5, 130
_USAGE_ERRORS = (JobFileError, UserCodeError, ProfileError, DataError, ReplayError, TrackerError)
_LOGIN_CODES = frozenset({"NO_OPERATOR", "ROLE_TOO_LOW", "TOO_MANY_LOGINS"})
"""The error codes of a server that refuses the operator, not the request."""

ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="HOST:PORT", help="Server to use. Default: FEDPLAT_SERVER, then the profile's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
FormatOption = Annotated[
    OutputFormat | None,
    typer.Option(
        "--output",
        "-o",
        case_sensitive=False,
        help="Format: a table, a table with more columns, one JSON value, a JSON line per row, or one name per line. "
        "Default: table.",
        show_default=False,
    ),
]


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
JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="Id of the job, or its name if it is unique.", autocompletion=completion.complete_jobs
    ),
]
ClientArgument = Annotated[
    str, typer.Argument(metavar="CLIENT", help="Id of the client.", autocompletion=completion.complete_clients)
]


@dataclasses.dataclass(frozen=True)
class CommandSession:
    """A command's connection, output and retry limit."""

    client: AdminClient
    output: Output
    patience: Patience


@contextlib.contextmanager
def reporting(
    context: typer.Context, as_json: bool, form: OutputFormat | None = None, json_form: OutputFormat = OutputFormat.JSON
) -> Generator[Output]:
    """End the command with one line per error on stderr and an exit status if fedplat raises an error.

    `json_form` is the format that --json stands for.
    """
    output = Output(form=_choose(as_json or settings_of(context).as_json, form, json_form))
    try:
        yield output
    except FedplatError as exc:
        for line in str(exc).splitlines():
            output.error(line)
        for note in getattr(exc, "__notes__", ()):
            output.note(note)
        raise typer.Exit(exit_status(exc)) from exc
    except UnicodeEncodeError as exc:  # an argument, which no message can hold
        output.error(f"'{texts.repair(exc.object)}' is not valid UTF-8; write it in UTF-8")
        raise typer.Exit(WRONG_USAGE) from exc


def exit_status(error: FedplatError) -> int:
    """Return the exit status of a command that ends with an error."""
    if isinstance(error, ServerUnreachableError):
        return UNREACHABLE
    if isinstance(error, MissingProfileError) or (isinstance(error, ServerRefusedError) and error.code in _LOGIN_CODES):
        return NOT_ALLOWED
    return WRONG_USAGE if isinstance(error, _USAGE_ERRORS) else FAILED


def _choose(as_json: bool, form: OutputFormat | None, json_form: OutputFormat) -> OutputFormat:
    """Return the format of --output, or the one that --json stands for. Raises `typer.BadParameter` for both."""
    if not as_json:
        return form or OutputFormat.TABLE
    if form not in (None, json_form):
        raise typer.BadParameter(f"--json is short for --output {json_form}; expected only one of the two")
    return json_form


@contextlib.contextmanager
def session(
    context: typer.Context,
    server: str | None,
    as_json: bool,
    timeout_s: float | None = None,
    *,
    form: OutputFormat | None = None,
    json_form: OutputFormat = OutputFormat.JSON,
) -> Generator[CommandSession]:
    """Connect to the server that the options name; `server`, `as_json` and `form` are those given after the command.

    A command that retries on its own passes `timeout_s`, from `own_timeout_s`. Other commands begin when the server has
    answered, within the global --timeout, and are not repeated.
    """
    with reporting(context, as_json, form, json_form) as output:
        settings = settings_of(context)
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
    before = settings_of(context).timeout_s
    return default_s if before is None else before


def settings_of(context: typer.Context) -> Settings:
    """Return the options given before the command."""
    return context.find_object(Settings) or Settings()
