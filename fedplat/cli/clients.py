"""`fedplat client ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from fedplat.cli import formats
from fedplat.cli.output import to_record
from fedplat.cli.session import JsonOption, LimitOption, ServerOption, session

app = typer.Typer(no_args_is_help=True, help="List and revoke clients.", rich_markup_mode=None)


@app.callback()
def clients() -> None:
    """List and revoke clients."""


@app.command("list")
def list_clients(
    context: typer.Context,
    population: Annotated[str, typer.Option(metavar="NAME", help="List only clients of this population.")] = "",
    limit: LimitOption = None,
    server: ServerOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the enrolled clients."""
    with session(context, server, as_json) as command:
        found = command.client.iter_clients(population, limit)
        if command.output.as_json:
            command.output.records(found)
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
        command.output.table(columns, rows, "no clients are enrolled" + (f" in {population}" if population else ""))


@app.command("revoke")
def revoke(
    context: typer.Context,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="Id of the client.")],
    server: ServerOption = None,
    as_json: JsonOption = False,
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
