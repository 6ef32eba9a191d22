"""Where a client finds its ticket: an argument, a file, or the environment."""

from __future__ import annotations

import os
from pathlib import Path

from fedplat.auth import MAX_TICKET, Ticket
from fedplat.errors import TicketError

VARIABLE = "FEDPLAT_TICKET"
FILE_VARIABLE = "FEDPLAT_TICKET_FILE"


def find(given: str | None = None, file: Path | None = None) -> Ticket | None:
    """The ticket that was given, or that the environment has; None if there is none. Raises `TicketError`."""
    if given is not None and file is not None:
        raise TicketError("there are a ticket and a file with a ticket; give one of them")
    if given is None and file is None:
        given = os.environ.get(VARIABLE) or None
        name = os.environ.get(FILE_VARIABLE)
        file = Path(name) if name and given is None else None
    if file is not None:
        given = _read(file)
    return Ticket.from_text(given) if given is not None else None


def _read(file: Path) -> str:
    try:
        with file.open(encoding="ascii", errors="replace") as opened:
            return opened.read(MAX_TICKET + 100)
    except OSError as exc:
        raise TicketError(f"the ticket file {file} cannot be read: {exc.strerror}") from exc
