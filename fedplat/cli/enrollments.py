"""`fedplat enrollment ...`: tokens with which new clients enroll."""

from __future__ import annotations

from typing import Annotated

import typer

from fedplat.cli import formats, lists, times
from fedplat.cli.lists import LimitOption, WatchableCommand, WatchOption
from fedplat.cli.output import to_record
from fedplat.cli.session import FormatOption, JsonOption, ServerOption, session
from fedplat.cli.tables import ListColumn, ListLayout
from fedplat.wire.auth import is_address
from fedplat.wire.v1 import admin_pb2

app = typer.Typer(no_args_is_help=True, help="Manage the tokens with which clients enroll.", rich_markup_mode=None)


@app.command("create")
def create(  # noqa: PLR0913 -- one parameter for each option of the command line
    context: typer.Context,
    population: Annotated[str, typer.Option(metavar="NAME", help="Population that the clients join.")],
    uses: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of clients that may enroll with it.")] = 1,
    expires: Annotated[str, typer.Option(metavar="TIME", help="Validity, such as 30m, 24h or 7d.")] = "24h",
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address at which clients reach the server. Default: the address that this command uses.",
        ),
    ] = "",
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a ticket for new clients.

    Prints the ticket as one line. Keep it secret until it is used up.
    """
    expires_s = times.seconds(expires, "--expires")
    if address and not is_address(address):
        raise typer.BadParameter(f"--address {address!r}: expected HOST:PORT, the address that clients connect to")
    with session(context, server, as_json) as command:
        made = command.client.create_enrollment(population, uses, expires_s, address or command.client.server)
        if command.output.as_json:
            command.output.json(to_record(made))
            return
        command.output.line(made.ticket)
        clients = "one client" if uses == 1 else f"{uses} clients"
        command.output.note(
            f"for {clients}, valid for {expires}: give it to fedplat-client as FEDPLAT_TICKET or --ticket-file; "
            f"revoke it with: fedplat enrollment revoke {made.enrollment.enrollment_id}"
        )


LAYOUT = ListLayout[admin_pb2.Enrollment](
    lambda one: one.enrollment_id,
    (
        ListColumn("ENROLLMENT", lambda one: one.enrollment_id),
        ListColumn("POPULATION", lambda one: one.population),
        ListColumn("STATE", lambda one: one.state),
        ListColumn("#LEFT", lambda one: str(one.num_left)),
        ListColumn("#USES", lambda one: str(one.num_uses)),
        ListColumn("CREATED", lambda one: formats.moment(one.created_unix_s), is_wide=True),
        ListColumn("EXPIRES", lambda one: formats.moment(one.expires_unix_s)),
    ),
)


@app.command("list", cls=WatchableCommand)
def list_enrollments(
    context: typer.Context,
    limit: LimitOption = None,
    watch: WatchOption = None,
    form: FormatOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the enrollment tokens, valid or not."""
    with session(context, server, as_json, form=form) as command:
        query = lists.Query[admin_pb2.Enrollment](
            command.client.page,
            admin_pb2.ListEnrollmentsRequest(),
            lambda page: page.enrollments,
            "there are no enrollment tokens",
        )
        lists.show(command, query, LAYOUT, limit, watch)


@app.command("revoke")
def revoke(
    context: typer.Context,
    enrollment: Annotated[str, typer.Argument(metavar="ENROLLMENT", help="Id of the enrollment token.")],
    with_clients: Annotated[
        bool, typer.Option("--with-clients", help="Also revoke all clients that enrolled with it.")
    ] = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke an enrollment token.

    Clients that enrolled with it stay enrolled, unless --with-clients is given.
    """
    with session(context, server, as_json) as command:
        revoked = command.client.revoke_enrollment(enrollment, with_clients=with_clients)
        if command.output.as_json:
            command.output.json(to_record(revoked))
            return
        command.output.line(f"{revoked.enrollment_id} is {revoked.state}")
        if with_clients:
            command.output.note(f"clients that enrolled with it, all revoked now: {revoked.num_revoked_clients}")
