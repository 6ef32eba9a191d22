"""`fedplat webhook ...`: HTTP addresses that receive the events of a server."""

from __future__ import annotations

from typing import Annotated

import typer

from fedplat.cli import formats
from fedplat.cli.events import TypesOption
from fedplat.cli.lists import LimitOption, choose_limit, note_more
from fedplat.cli.output import to_record
from fedplat.cli.session import FAILED, FormatOption, JsonOption, ServerOption, session
from fedplat.cli.tables import ListColumn, ListLayout
from fedplat.wire.v1 import events_pb2

app = typer.Typer(no_args_is_help=True, help="Send the server's events to HTTP addresses.", rich_markup_mode=None)
WebhookArgument = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Id of the webhook.")]


@app.command("add")
def add(
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


LAYOUT = ListLayout[events_pb2.Webhook](
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


@app.command("list")
def list_webhooks(
    context: typer.Context, form: FormatOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List the webhooks with their pending events."""
    with session(context, server, as_json, form=form) as command:
        empty = "there are no webhooks; add one with: fedplat webhook add URL"
        command.output.rows(command.client.list_webhooks(), LAYOUT, empty)


@app.command("remove")
def remove(context: typer.Context, webhook: WebhookArgument, server: ServerOption = None) -> None:
    """Remove a webhook; its pending events are not sent."""
    with session(context, server, as_json=False) as command:
        command.client.remove_webhook(webhook)
        command.output.note(f"removed webhook {webhook}")


@app.command("test")
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


@app.command("deliveries")
def list_deliveries(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    webhook: Annotated[str, typer.Argument(metavar="[WEBHOOK]", help="Id of the webhook. Default: all.")] = "",
    state: Annotated[
        str, typer.Option(metavar="STATE", help="Only deliveries in this state: pending, delivered or failed.")
    ] = "",
    limit: LimitOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List deliveries of events to webhooks, the latest event first."""
    with session(context, server, as_json, form=form) as command:
        number = choose_limit(limit, command.output)
        rows = command.client.iter_deliveries(number + 1 if number else None, webhook_id=webhook, state=state)
        found = list(rows)  # one more than is shown, since the server does not count them
        command.output.rows(found[: number or None], DELIVERY_LAYOUT, "there are no such deliveries")
        if command.output.is_for_people and number and len(found) > number:
            command.output.note(note_more(number))


def _outcome(delivery: events_pb2.Delivery) -> str:
    return "accepted" if delivery.state == "delivered" else "not accepted"
