"""`fedplat enrollment ...`: let new clients in."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from fedplat.auth import is_address
from fedplat.cli import formats
from fedplat.cli.output import to_record
from fedplat.cli.session import JsonOption, LimitOption, ServerOption, session

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

app = typer.Typer(no_args_is_help=True, help="Let new clients in.", rich_markup_mode=None)


def seconds(text: str) -> float:
    """Reads a duration such as 30m, 24h or 7d. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"([0-9]{1,6})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise typer.BadParameter(f"{text!r}: expected a number and s, m, h or d, such as 24h")
    return float(int(match[1]) * _UNITS[match[2]])


@app.command("create")
def create(  # noqa: PLR0913 -- one parameter for each option of the command line
    context: typer.Context,
    population: Annotated[str, typer.Option(metavar="NAME", help="The population that the clients join.")],
    uses: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many clients may enroll by it.")] = 1,
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long it is good: 30m, 24h, 7d.")] = "24h",
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients reach the server; else as this command does.")
    ] = "",
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a ticket, by which new clients enroll; prints one line, which is secret until it is used up."""
    expires_s = seconds(expires)
    if address and not is_address(address):
        raise typer.BadParameter(f"--address {address!r}: expected HOST:PORT, as the clients shall call it")
    with session(context, server, as_json) as here:
        made = here.client.create_enrollment(population, uses, expires_s, address or here.client.server)
        if here.output.as_json:
            here.output.json(to_record(made))
            return
        here.output.line(made.ticket)
        clients = "one client" if uses == 1 else f"{uses} clients"
        here.output.note(
            f"for {clients}, good for {expires}: give it to fedplat-client as FEDPLAT_TICKET or --ticket-file; "
            f"to take it back: fedplat enrollment revoke {made.enrollment.enrollment_id}"
        )


@app.command("list")
def list_enrollments(
    context: typer.Context, limit: LimitOption = None, server: ServerOption = None, as_json: JsonOption = False
) -> None:
    """List the enrollment tokens, good or not."""
    with session(context, server, as_json) as here:
        found = here.client.iter_enrollments(limit)
        if here.output.as_json:
            here.output.records(found)
            return
        rows = (
            (
                one.enrollment_id,
                one.population,
                one.state,
                str(one.num_left),
                str(one.num_uses),
                formats.moment(one.created_unix_s),
                formats.moment(one.expires_unix_s),
            )
            for one in found
        )
        columns = ("ENROLLMENT", "POPULATION", "STATE", "#LEFT", "#USES", "CREATED", "EXPIRES")
        here.output.table(columns, rows, "there are no enrollment tokens")


@app.command("revoke")
def revoke(
    context: typer.Context,
    enrollment: Annotated[str, typer.Argument(metavar="ENROLLMENT", help="The id of an enrollment token.")],
    with_clients: Annotated[
        bool, typer.Option("--with-clients", help="Also revoke all clients that have enrolled by it.")
    ] = False,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let no client enroll by a token any more; clients that have enrolled stay, unless --with-clients is given."""
    with session(context, server, as_json) as here:
        revoked = here.client.revoke_enrollment(enrollment, with_clients=with_clients)
        if here.output.as_json:
            here.output.json(to_record(revoked))
            return
        here.output.line(f"{revoked.enrollment_id} is {revoked.state}")
        if with_clients:
            here.output.note(f"clients that have enrolled by it, all revoked now: {revoked.num_revoked_clients}")
