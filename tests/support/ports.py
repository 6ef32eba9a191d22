"""Free ports, for programs that listen on an address which others have to know before."""

from __future__ import annotations

import contextlib
import secrets
import socket


def free_port() -> int:
    """A port of no program, below those that connections get, which would take it before the program listens."""
    while True:
        port = secrets.choice(range(10_000, 30_000))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
