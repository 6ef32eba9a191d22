"""`fedplat events` and `fedplat webhook`: the events of a server, and the HTTP addresses that receive them."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Annotated

import typer

from fedplat import admin, errors
from fedplat.admin.patience import Patience
from fedplat.cli import formats, lists
from fedplat.cli.options import JsonOption, ServerOption, TimeoutOption
from fedplat.cli.output import ListColumn, ListLayout, Output, OutputFormat, to_record
from fedplat.cli.session import FAILED, INTERRUPTED, CommandSession, FormatOption, own_timeout_s, session
from fedplat.command_line.with_typer import make_group
from fedplat.wire.v1 import events_pb2

DEFAULT_NUM_EVENTS = 50
MAX_NUM_EVENTS = 100_000

TypesOption = Annotated[
    list[str] | None,
    typer.Option("--type", metavar="TYPE", help="Only events of this type, such as round.committed; repeatable."),
]


def events(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    follow: lists.FollowOption = False,
    types: TypesOption = None,
    job: Annotated[str, typer.Option("--job", metavar="JOB", help="Only events of this job.")] = "",
    since: formats.SinceOption = "",
    number: Annotated[
        int,
        typer.Option("--limit", "-n", min=0, max=MAX_NUM_EVENTS, metavar="N", help="Number of latest events to show."),
    ] = DEFAULT_NUM_EVENTS,
    form: FormatOption = None,
    timeout: TimeoutOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the latest events of the server, the oldest first.

    The formats table and wide are lines of text. --json prints each event as one line, as --output jsonl does. Ctrl-C
    ends --follow.
    """
    since_s = formats.parse_since(since)
    with session(
        context, server, as_json, own_timeout_s(context, timeout), form=form, json_form=OutputFormat.JSONL
    ) as command:
        if follow and command.output.form is OutputFormat.JSON:
            raise typer.BadParameter("--follow prints events as they happen; expected --output jsonl, not json")
        reader = EventReader(command.client, command.output, types or [], job)
        try:
            command.patience.run(command.client, lambda: reader.show_latest(number, since_s))
            if follow:
                _follow(command, reader)
        except KeyboardInterrupt as exc:
            raise typer.Exit(INTERRUPTED) from exc


class EventReader:
    """Shows events of some types and of one job (empty: all), each once and in order."""

    def __init__(self, client: admin.AdminClient, output: Output, types: list[str], job: str) -> None:
        self._client = client
        self._output = output
        self._types = types
        self._job = job
        self._last_sequence = 0

    def show_latest(self, number: int, since_unix_s: float = 0.0) -> None:
        """Show the latest events since a time, at most `number`."""
        newest = next(self._client.iter_events(1, newest_first=True), None)
        latest = self._client.iter_events(number + 1, types=self._types, job=self._job, newest_first=True)
        found = deque(itertools.takewhile(lambda event: event.unix_s >= since_unix_s, latest))
        if len(found) > number:
            found.pop()
            if number:
                self._output.note(f"only the latest {number} events are shown; -n N shows more")
        elif not found and self._output.is_for_people:
            is_filtered = self._types or self._job or since_unix_s
            self._output.note("there are no such events" if is_filtered else "there are no events")
        if self._output.form is OutputFormat.JSON:
            self._output.records(reversed(found))
        else:
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
            is_name = self._output.form is OutputFormat.NAME
            self._output.line(str(event.sequence) if is_name else describe(event))
        self._last_sequence = event.sequence


def _follow(command: CommandSession, reader: EventReader) -> None:
    def until_unreachable() -> None:
        reader.follow(command.patience)
        raise errors.ServerUnreachableError(
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


webhook_app = make_group("Send the server's events to HTTP addresses.")
WebhookArgument = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Id of the webhook.")]


@webhook_app.command("add")
def add_webhook(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Address that receives the events, https://...")],
    types: TypesOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a webhook, which receives new events.

    The secret, the key of the signatures, is printed once: the server does not show it again.
    """
    with session(context, server, as_json) as command:
        added = command.client.add_webhook(url, types or [])
        if command.output.as_json:
            command.output.json(to_record(added))
            return
        webhook = added.webhook
        command.output.fields(
            {
                "webhook": webhook.webhook_id,
                "url": webhook.url,
                "types": ", ".join(webhook.types) or "all",
                "secret": added.secret,
            }
        )
        command.output.note(f"store the secret now; test the webhook with: fedplat webhook test {webhook.webhook_id}")


WEBHOOK_LAYOUT = ListLayout[events_pb2.Webhook](
    lambda webhook: webhook.webhook_id,
    (
        ListColumn("WEBHOOK", lambda webhook: webhook.webhook_id),
        ListColumn("#PENDING", lambda webhook: str(webhook.num_pending)),
        ListColumn("OLDEST", lambda webhook: formats.moment(webhook.oldest_unix_s)),
        ListColumn("LAST RESULT", lambda webhook: webhook.last_result or formats.NOTHING),
        ListColumn("AT", lambda webhook: formats.moment(webhook.last_unix_s)),
        ListColumn("TYPES", lambda webhook: ", ".join(webhook.types) or "all", is_wide=True),
        ListColumn("URL", lambda webhook: webhook.url),
    ),
)


@webhook_app.command("list")
def list_webhooks(
    context: typer.Context,
    limit: lists.LimitOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the webhooks with their pending events."""
    with session(context, server, as_json, form=form) as command:
        empty = "there are no webhooks; add one with: fedplat webhook add URL"
        lists.show_rows(command.output, command.client.list_webhooks(), WEBHOOK_LAYOUT, empty, limit)


@webhook_app.command("remove")
def remove_webhook(context: typer.Context, webhook: WebhookArgument, server: ServerOption = None) -> None:
    """Remove a webhook; its pending events are not sent."""
    with session(context, server, as_json=False) as command:
        command.client.remove_webhook(webhook)
        command.output.note(f"removed webhook {webhook}")


@webhook_app.command("test")
def send_test(
    context: typer.Context, webhook: WebhookArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Send a test event to a webhook and show the result.

    The exit status is 0 if the receiver accepted it.
    """
    with session(context, server, as_json) as command:
        delivery = command.client.test_webhook(webhook)
        if command.output.as_json:
            command.output.json(to_record(delivery))
        else:
            command.output.line(f"the test of webhook {webhook} was {_outcome(delivery)}: {delivery.result}")
        if delivery.state != "delivered":
            raise typer.Exit(FAILED)


DELIVERY_LAYOUT = ListLayout[events_pb2.Delivery](
    lambda delivery: f"{delivery.webhook_id}/{delivery.event.sequence}",
    (
        ListColumn("WEBHOOK", lambda delivery: delivery.webhook_id),
        ListColumn("#EVENT", lambda delivery: str(delivery.event.sequence)),
        ListColumn("TYPE", lambda delivery: delivery.event.type),
        ListColumn("STATE", lambda delivery: delivery.state),
        ListColumn("#ATTEMPTS", lambda delivery: str(delivery.num_attempts)),
        ListColumn("LAST", lambda delivery: formats.moment(delivery.last_unix_s), is_wide=True),
        ListColumn("NEXT", lambda delivery: formats.moment(delivery.next_unix_s)),
        ListColumn("RESULT", lambda delivery: delivery.result or formats.NOTHING),
    ),
)


@webhook_app.command("deliveries")
def list_deliveries(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    webhook: Annotated[str, typer.Argument(metavar="[WEBHOOK]", help="Id of the webhook. Default: all.")] = "",
    state: Annotated[
        str, typer.Option(metavar="STATE", help="Only deliveries in this state: pending, delivered or failed.")
    ] = "",
    limit: lists.LimitOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List deliveries of events to webhooks, the latest event first."""
    with session(context, server, as_json, form=form) as command:
        number = lists.choose_limit(limit, command.output)
        rows = command.client.iter_deliveries(number + 1 if number else None, webhook_id=webhook, state=state)
        found = list(rows)  # one more than is shown, since the server does not count them
        command.output.rows(found[: number or None], DELIVERY_LAYOUT, "there are no such deliveries")
        if command.output.is_for_people and number and len(found) > number:
            command.output.note(lists.note_more(number))


def _outcome(delivery: events_pb2.Delivery) -> str:
    return "accepted" if delivery.state == "delivered" else "not accepted"
