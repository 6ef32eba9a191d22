"""`fedplat client ...`."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

from fedplat.cli import assignments, client_description, formats, lists
from fedplat.cli.assignments import StateOption
from fedplat.cli.lists import LimitOption, WatchableCommand, WatchOption
from fedplat.cli.output import to_record
from fedplat.cli.session import ClientArgument, FormatOption, JsonOption, ServerOption, session
from fedplat.cli.tables import ListColumn, ListLayout
from fedplat.wire.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="List, describe and revoke clients.", rich_markup_mode=None)


class ClientStateChoice(enum.StrEnum):
    """A state of a client, as `Client.state` names it."""

    WAITING = "waiting"
    BUSY = "busy"
    AWAY = "away"
    REVOKED = "revoked"


LAYOUT = ListLayout[admin_pb2.Client](
    lambda client: client.client_id,
    (
        ListColumn("CLIENT", lambda client: client.client_id),
        ListColumn("POPULATION", lambda client: client.population),
        ListColumn("STATE", lambda client: _state(client)),
        ListColumn("JOB", lambda client: client.job_id or formats.NOTHING, is_wide=True),
        ListColumn("LAST SEEN", lambda client: formats.moment(client.last_seen_unix_s)),
        ListColumn("ENROLLED", lambda client: formats.moment(client.enrolled_unix_s), is_wide=True),
        ListColumn("ENROLLMENT", lambda client: client.enrollment_id or formats.NOTHING, is_wide=True),
        ListColumn("VERSION", lambda client: client.software_version or formats.NOTHING, is_wide=True),
        ListColumn("TRAINERS", lambda client: ", ".join(client.trainers) or formats.NOTHING, is_wide=True),
        ListColumn("LABELS", lambda client: formats.labels(client.labels)),
    ),
)


@app.command("list", cls=WatchableCommand)
def list_clients(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    population: Annotated[str, typer.Option(metavar="NAME", help="Only clients of this population.")] = "",
    state: Annotated[
        ClientStateChoice | None,
        typer.Option(case_sensitive=False, help="Only clients in this state.", show_default=False),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only clients with this label; repeatable.")
    ] = None,
    search: Annotated[str, typer.Option(metavar="TEXT", help="Only clients whose id contains this text.")] = "",
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the enrolled clients."""
    labels = _parse_labels(label or [])
    filtered = bool(state or labels or search)
    with session(context, server, as_json, form=form) as command:
        query = lists.Query[admin_pb2.Client](
            command.client.page,
            admin_pb2.ListClientsRequest(
                population=population, state=state.value if state else "", labels=labels, search=search
            ),
            lambda page: page.clients,
            "no clients match" if filtered else "no clients are enrolled" + (f" in {population}" if population else ""),
        )
        lists.show(command, query, LAYOUT, limit, watch)


@app.command("show")
def show_client(
    context: typer.Context,
    client: ClientArgument,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a client."""
    with session(context, server, as_json, form=form) as command:
        found = command.client.show_client(client)
        command.output.show(found, found.client_id, lambda: client_description.fields(found))


@app.command("describe")
def describe_client(
    context: typer.Context,
    client: ClientArgument,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Describe a client: its state and its assignments, and why jobs do not select it."""
    with session(context, server, as_json, form=form) as command:
        client_description.describe(command, client)


@app.command("assignments", cls=WatchableCommand)
def list_assignments(  # noqa: PLR0913 - a command's parameters are its options
    context: typer.Context,
    client: ClientArgument,
    state: StateOption = None,
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the assignments of a client, the latest first."""
    request = admin_pb2.ListAssignmentsRequest(client_id=client, states=assignments.names(state))
    with session(context, server, as_json, form=form) as command:
        query = assignments.query(command.client, request, f"there are no such assignments of {client}")
        lists.show(command, query, assignments.OF_CLIENT, limit, watch)


@app.command("revoke")
def revoke(
    context: typer.Context, client: ClientArgument, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """Revoke a client for good.

    The server refuses its requests from now on. Its enrollment token stays valid; revoke it separately with
    fedplat enrollment revoke.
    """
    with session(context, server, as_json) as command:
        revoked = command.client.revoke_client(client)
        if command.output.as_json:
            command.output.json(to_record(revoked))
            return
        command.output.line(f"{revoked.client_id} is {revoked.state}")
        if revoked.enrollment_id:
            command.output.note(
                f"its enrollment token may still be valid; revoke it with: "
                f"fedplat enrollment revoke {revoked.enrollment_id}"
            )


def _parse_labels(pairs: list[str]) -> dict[str, str]:
    """Parse NAME=VALUE. Raises `typer.BadParameter`."""
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--label {pair!r}: expected NAME=VALUE, such as region=eu")
        if labels.setdefault(name, value) != value:
            raise typer.BadParameter(f"--label {pair!r}: {name} has two values; a client has one value of each label")
    return labels


def _state(client: admin_pb2.Client) -> str:
    progress = f" {client.progress:.0%}" if client.HasField("progress") else ""
    return client.state + progress + client_description.describe_silence(client)
