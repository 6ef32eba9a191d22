"""`fedplat client ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from fedplat.cli import formats
from fedplat.cli.output import to_record
from fedplat.cli.session import JsonOption, LimitOption, ServerOption, session

app = typer.Typer(no_args_is_help=True, help="See who is enrolled, and revoke.", rich_markup_mode=None)


@app.callback()
def clients() -> None:
    """See who is enrolled, and revoke."""


@app.command("list")
def list_clients(
    context: typer.Context,
    population: Annotated[str, typer.Option(metavar="NAME", help="Only clients of this population.")] = "",
    limit: LimitOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the enrolled clients."""
    with session(context, server, as_json) as here:
        found = here.client.iter_clients(population, limit)
        if here.output.as_json:
            here.output.records(found)
            return
        rows = (
            (
                client.client_id,
                client.population,
                client.state + (f" {client.progress:.0%}" if client.HasField("progress") else ""),
                client.job_id or formats.NOTHING,
                formats.moment(client.last_seen_unix_s),
                client.enrollment_id or formats.NOTHING,
                client.software_version,
                " ".join(f"{name}={value}" for name, value in sorted(client.labels.items())),
            )
            for client in found
        )
        columns = ("CLIENT", "POPULATION", "STATE", "JOB", "LAST SEEN", "ENROLLMENT", "VERSION", "LABELS")
        here.output.table(columns, rows, "no clients are enrolled" + (f" in {population}" if population else ""))


@app.command("revoke")
def revoke(
    context: typer.Context,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="A client's id.")],
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a client's membership for good, from its next request on. Its ticket stays good: revoke that as well."""
    with session(context, server, as_json) as here:
        revoked = here.client.revoke_client(client)
        if here.output.as_json:
            here.output.json(to_record(revoked))
            return
        here.output.line(f"{revoked.client_id} is {revoked.state}")
        if revoked.enrollment_id:
            here.output.note(
                f"its ticket may have uses left; revoke it as well: fedplat enrollment revoke {revoked.enrollment_id}"
            )
