"""Common parts of all commands: options, profile, connection, completion, and errors as one line and an exit status.

Exit status: 0 success, 1 refused by the server or failed job, 2 a mistake in what the user has given
(`errors.USAGE_ERRORS`), 3 the time of `fedplat job wait` is over, 4 not logged in or not allowed, 5 the server cannot
be reached, 130 Ctrl-C, 143 SIGTERM.

A completion never writes a message: without a profile, without a server, or after a second, there are no names.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import queue
import re
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
import typer

from fedplat import errors, texts
from fedplat.admin import AdminClient, contexts, profile
from fedplat.admin.patience import DEFAULT_TIMEOUT_S, Patience
from fedplat.cli import formats
from fedplat.cli.options import AUTO
from fedplat.cli.output import Output, OutputFormat
from fedplat.wire.v1 import admin_pb2


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options given before the command."""

    server: str | None = None
    as_json: bool = False
    profile: Path | None = None
    context: str | None = None
    ca: Path | None = None
    insecure: bool = False
    timeout_s: float | None = None
    transport: str | None = None

    def resolve(self, server: str | None) -> profile.Profile:
        """Return the profile, overridden by the command line and the environment. Raises `ProfileError`."""
        token = os.environ.get("FEDPLAT_TOKEN")
        changes: dict[str, Any] = {}
        if server or self.server:
            changes["server"] = server or self.server
        found = self._load_profile(is_needed=not token, needs_server=not changes)
        if self.ca is not None:
            changes["ca"] = profile.load_ca(self.ca)
        if self.insecure:
            changes["insecure"] = True
        if self.transport not in (None, AUTO):
            changes["transport"] = self.transport
        if token:
            changes["token"] = token
        return msgspec.structs.replace(found, **changes)

    def _load_profile(self, *, is_needed: bool, needs_server: bool) -> profile.Profile:
        """Return the stored profile; an empty one if none is stored or needed."""
        if self.profile is not None:
            return profile.load(self.profile, needs_server=needs_server)
        try:
            store = contexts.ContextStore.of_user()
        except errors.ProfileError:
            if is_needed or self.context is not None:
                raise
            return profile.Profile()
        name = store.current if self.context is None else self.context
        path = store.locate(name)
        if path.exists() or name != contexts.DEFAULT:
            return profile.load(store.find(name), needs_server=needs_server)
        if is_needed or self.context is not None:
            others = "".join(f" {each}" for each in store.names())
            raise errors.MissingProfileError(
                f"there is no profile at {path}; expected one there, or --profile FILE or FEDPLAT_PROFILE. "
                "fedplat-server dev writes it on this machine; fedplat-server init writes the first profile on the "
                "server's machine (DATA_DIR/admin.toml)"
                + (f". There are other contexts:{others}; choose one with: fedplat context use NAME" if others else "")
            )
        return profile.Profile()


LIMIT_S = 1.0
MAX_NAMES = 100
_SAFE = re.compile(r"[A-Za-z0-9_.:@+-]{1,200}")
"""What may be completed. The shell would have to quote other names, and a terminal must not receive control codes."""
_Names = list[tuple[str, str]]


def complete_jobs(context: typer.Context, incomplete: str) -> _Names:
    """Return the names of jobs that begin with a text, the latest first; a job without a unique name has its id."""

    def ask(client: AdminClient) -> _Names:
        request = admin_pb2.ListJobsRequest(search=incomplete, newest_first=True, page_size=MAX_NAMES)
        jobs = client.page(request).jobs
        counts = collections.Counter(job.name for job in jobs)
        named = (
            (job.name if counts[job.name] == 1 and job.name.startswith(incomplete) else job.job_id, job) for job in jobs
        )
        return [(name, formats.job_status(job.status)) for name, job in named]

    return _select(ask_server(context, ask), incomplete)


def complete_clients(context: typer.Context, incomplete: str) -> _Names:
    """Return the ids of clients that begin with a text."""

    def ask(client: AdminClient) -> _Names:
        request = admin_pb2.ListClientsRequest(search=incomplete, page_size=MAX_NAMES)
        return [(found.client_id, found.state) for found in client.page(request).clients]

    return _select(ask_server(context, ask), incomplete)


def _select(names: _Names, incomplete: str) -> _Names:
    return [
        (name, formats.printable(text))
        for name, text in names[:MAX_NAMES]
        if name.startswith(incomplete) and _SAFE.fullmatch(name)
    ]


def ask_server(context: click.Context, ask: Callable[[AdminClient], _Names], limit_s: float = LIMIT_S) -> _Names:
    """Return what the server of a command line answers within a time; nothing if it does not."""
    # In a thread: after a failed call, the diagnosis of the connection may take longer.
    answers: queue.SimpleQueue[_Names] = queue.SimpleQueue()

    def run() -> None:
        try:
            with AdminClient(_settings(context).resolve(context.params.get("server")), timeout_s=limit_s) as client:
                answers.put(ask(client))
        except (errors.FedplatError, ValueError, OSError):
            answers.put([])

    threading.Thread(target=run, name="completion", daemon=True).start()
    try:
        return answers.get(timeout=limit_s)
    except queue.Empty:
        return []


def _settings(context: click.Context) -> Settings:
    """Return the options given before the command; a completion neither runs their callback nor makes paths of them."""
    given = context.find_root().params
    profile, ca = given.get("profile"), given.get("ca")
    return Settings(
        server=given.get("server"),
        profile=Path(profile) if profile else None,
        context=given.get("context_name"),
        ca=Path(ca) if ca else None,
        insecure=bool(given.get("insecure")),
        transport=given.get("transport"),
    )


FAILED, WRONG_USAGE, TIMED_OUT, NOT_ALLOWED, UNREACHABLE, INTERRUPTED = 1, 2, 3, 4, 5, 130
_LOGIN_CODES = frozenset({"NO_OPERATOR", "ROLE_TOO_LOW", "TOO_MANY_LOGINS"})
"""The error codes of a server that refuses the operator, not the request."""

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
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Id of the job, or its name if it is unique.", autocompletion=complete_jobs)
]
ClientArgument = Annotated[
    str, typer.Argument(metavar="CLIENT", help="Id of the client.", autocompletion=complete_clients)
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
    except errors.FedplatError as exc:
        code = exc.code if isinstance(exc, errors.ServerRefusedError) else ""
        for line in f"{exc}{errors.refer_to_docs(code)}".splitlines():
            output.error(line)
        for note in getattr(exc, "__notes__", ()):
            output.note(note)
        raise typer.Exit(exit_status(exc)) from exc
    except UnicodeEncodeError as exc:  # an argument, which no message can hold
        output.error(f"'{texts.repair(exc.object)}' is not valid UTF-8; write it in UTF-8")
        raise typer.Exit(WRONG_USAGE) from exc


def exit_status(error: errors.FedplatError) -> int:
    """Return the exit status of a command that ends with an error."""
    if isinstance(error, errors.ServerUnreachableError):
        return UNREACHABLE
    if isinstance(error, errors.MissingProfileError) or (
        isinstance(error, errors.ServerRefusedError) and error.code in _LOGIN_CODES
    ):
        return NOT_ALLOWED
    return WRONG_USAGE if isinstance(error, errors.USAGE_ERRORS) else FAILED


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
