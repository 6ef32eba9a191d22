"""`fedplat events`: the events of a server, as a list and as they happen."""

from __future__ import annotations

from collections import deque
from typing import Annotated

import typer

from fedplat.admin import AdminClient
from fedplat.admin.patience import Patience
from fedplat.cli import formats
from fedplat.cli.output import Output, to_record
from fedplat.cli.session import (
    INTERRUPTED,
    CommandSession,
    JsonOption,
    ServerOption,
    TimeoutOption,
    own_timeout_s,
    session,
)
from fedplat.errors import ServerUnreachableError
from fedplat.wire.v1 import events_pb2

DEFAULT_NUM_EVENTS = 50
MAX_NUM_EVENTS = 100_000

TypesOption = Annotated[
    list[str] | None,
    typer.Option("--type", metavar="TYPE", help="Only events of this type, such as round.committed; repeatable."),
]


def events(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new events and show them.")] = False,
    types: TypesOption = None,
    job: Annotated[str, typer.Option("--job", metavar="JOB", help="Only events of this job.")] = "",
    number: Annotated[
        int,
        typer.Option("--number", "-n", min=0, max=MAX_NUM_EVENTS, metavar="N", help="Number of latest events to show."),
    ] = DEFAULT_NUM_EVENTS,
    timeout: TimeoutOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the latest events of the server, the oldest first.

    With --json, each event is printed as one line. Ctrl-C ends --follow.
    """
    with session(context, server, as_json, own_timeout_s(context, timeout)) as command:
        reader = EventReader(command.client, command.output, types or [], job)
        try:
            command.patience.run(command.client, lambda: reader.show_latest(number))
            if follow:
                _follow(command, reader)
        except KeyboardInterrupt as exc:
            raise typer.Exit(INTERRUPTED) from exc


class EventReader:
    """Shows events of some types and of one job (empty: all), each once and in order."""

    def __init__(self, client: AdminClient, output: Output, types: list[str], job: str) -> None:
        self._client = client
        self._output = output
        self._types = types
        self._job = job
        self._last_sequence = 0

    def show_latest(self, number: int) -> None:
        """Show the latest events, at most `number`."""
        newest = next(self._client.iter_events(1, newest_first=True), None)
        found = deque(
            self._client.iter_events(number + 1, types=self._types, job=self._job, newest_first=True), number + 1
        )
        if len(found) > number:
            found.pop()
            if number:
                self._output.note(f"only the latest {number} events are shown; -n N shows more")
        elif not found:
            self._output.note("there are no such events" if self._types or self._job else "there are no events")
        for event in reversed(found):
            self._show(event)
        # Without a shown event `follow` must not begin with the first one of the server.
        self._last_sequence = max(self._last_sequence, newest.sequence if newest is not None else 0)

    def follow(self, patience: Patience) -> None:
        """Show new events as they happen, until the server cannot be reached; `patience` starts again with each."""
        for event in self._client.watch_events(self._last_sequence, types=self._types, job=self._job):
            self._show(event)
            patience.reset()

    def _show(self, event: events_pb2.Event) -> None:
        if self._output.as_json:
            self._output.json(to_record(event))
        else:
            self._output.line(describe(event))
        self._last_sequence = event.sequence


def _follow(command: CommandSession, reader: EventReader) -> None:
    def until_unreachable() -> None:
        reader.follow(command.patience)
        raise ServerUnreachableError(
            f"the server at {command.client.server} closed the watch", reason="it closed the watch"
        )

    command.patience.run(command.client, until_unreachable, watches=True)


def describe(event: events_pb2.Event) -> str:
    """Return an event as one line."""
    parts = [str(event.sequence), formats.moment(event.unix_s), event.type]
    if event.job_id:
        parts.append(f"job {event.job_name or event.job_id}")
    if event.round:
        parts.append(f"round {event.round}" + (f" attempt {event.attempt}" if event.attempt > 1 else ""))
    if event.client_id:
        parts.append(f"client {event.client_id}")
    if event.subject and event.subject not in event.text:
        parts.append(event.subject)
    return "  ".join([*parts, event.text] if event.text else parts)
