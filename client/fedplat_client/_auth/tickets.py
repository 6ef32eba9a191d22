"""Where a client reads its ticket from: an argument, a file, or the environment."""

from __future__ import annotations

import os
from pathlib import Path

from fedplat.errors import TicketError
from fedplat.wire.auth import MAX_TICKET, Ticket

VARIABLE = "FEDPLAT_TICKET"
FILE_VARIABLE = "FEDPLAT_TICKET_FILE"


def find(text: str | None = None, file: Path | None = None) -> Ticket | None:
    """Return the ticket from the arguments, else from the environment, else None. Raises `TicketError`."""
    if text is not None and file is not None:
        raise TicketError("both a ticket and a ticket file were given; expected one of them")
    if text is None and file is None:
        text = os.environ.get(VARIABLE) or None
        name = os.environ.get(FILE_VARIABLE)
        file = Path(name) if name and text is None else None
    if file is not None:
        text = _read(file)
    return Ticket.from_text(text) if text is not None else None


def _read(file: Path) -> str:
    try:
        with file.open(encoding="ascii", errors="replace") as opened:
            return opened.read(MAX_TICKET + 100)
    except OSError as exc:
        raise TicketError(f"the ticket file {file} cannot be read: {exc.strerror}") from exc
