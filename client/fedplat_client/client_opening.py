"""Which client a command means: the one of its ticket or its options, or the only one in the data directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import click

from fedplat.command_line import settings
from fedplat.errors import TicketError
from fedplat_client import errors, log
from fedplat_client._auth import enrollment
from fedplat_client.client import Client
from fedplat_client.command_options import IdentityOptions
from fedplat_client.options import ClientOptions
from fedplat_client.trainer_options import UsageError


class ClientArguments(TypedDict):
    """The arguments of a client besides which one it is."""

    labels: dict[str, str]
    data_dir: Path | None
    options: ClientOptions
    plugins: Mapping[str, type | str]


def find_client(options: IdentityOptions, client_options: ClientOptions | None = None) -> Client:
    """Open a client that runs no tasks, so that its trainers do not matter. Raises `UsageError`."""
    arguments: ClientArguments = {
        "labels": {},
        "data_dir": options["data_dir"],
        "options": client_options or ClientOptions(),
        "plugins": {},
    }
    try:
        return open_client(options, arguments)
    except (ValueError, TicketError, errors.DataDirectoryError) as exc:
        raise UsageError(log.make_printable(str(exc))) from exc


def open_client(options: IdentityOptions, given: ClientArguments) -> Client:
    """Open the client named by the ticket or the options; without either, the one enrolled in the data directory."""
    server, population = options["server"], options["population"]
    text, file, context = options["ticket"], options["ticket_file"], click.get_current_context()
    ranks = settings.rank(context, "ticket"), settings.rank(context, "ticket_file")
    if text is not None and file is not None and ranks not in ((0, 0), (2, 2)):  # of two variables the ticket counts
        text, file = (text, None) if ranks[0] <= ranks[1] else (None, file)
    ticket = enrollment.find_ticket(text, file)
    if ticket is not None:
        if (server or ticket.server, population or ticket.population) != (ticket.server, ticket.population):
            raise UsageError(
                f"the ticket is for {ticket.population!r} at {ticket.server}, but --server or --population differs; "
                "use either the ticket or the options"
            )
        return Client.from_ticket(ticket.to_text(), **given)
    if server and population:
        return Client(server, population=population, **given)
    if server or population:
        raise UsageError("--server and --population must be used together; a ticket contains both")
    return Client.from_ticket(**given)
