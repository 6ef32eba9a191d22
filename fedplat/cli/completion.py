"""Completion of the names of jobs and clients in a shell (`fedplat --install-completion`). It asks the server.

A completion never writes a message: without a profile, without a server, or after a second, there are no names.
"""

from __future__ import annotations

import collections
import queue
import re
import threading
from collections.abc import Callable
from pathlib import Path

import click
import typer

from fedplat.admin import AdminClient
from fedplat.cli import formats
from fedplat.cli.settings import Settings
from fedplat.errors import FedplatError
from fedplat.wire.v1 import admin_pb2

LIMIT_S = 1.0
MAX_NAMES = 100
_SAFE = re.compile(r"[A-Za-z0-9_.:@+-]{1,200}")
"""What may be completed. The shell would have to quote other names, and a terminal must not receive control codes."""
_Names = list[tuple[str, str]]


def complete_jobs(context: typer.Context, incomplete: str) -> _Names:
    """Return the names of jobs that begin with a text, the latest first; a job without a unique name has its id."""

    def ask(client: AdminClient) -> _Names:
        request = admin_pb2.ListJobsRequest(search=incomplete, newest_first=True, page_size=MAX_NAMES)
        jobs = client.page(request).jobs
        counts = collections.Counter(job.name for job in jobs)
        named = (
            (job.name if counts[job.name] == 1 and job.name.startswith(incomplete) else job.job_id, job) for job in jobs
        )
        return [(name, formats.job_status(job.status)) for name, job in named]

    return _select(ask_server(context, ask), incomplete)


def complete_clients(context: typer.Context, incomplete: str) -> _Names:
    """Return the ids of clients that begin with a text."""

    def ask(client: AdminClient) -> _Names:
        request = admin_pb2.ListClientsRequest(search=incomplete, page_size=MAX_NAMES)
        return [(found.client_id, found.state) for found in client.page(request).clients]

    return _select(ask_server(context, ask), incomplete)


def _select(names: _Names, incomplete: str) -> _Names:
    return [
        (name, formats.printable(text))
        for name, text in names[:MAX_NAMES]
        if name.startswith(incomplete) and _SAFE.fullmatch(name)
    ]


def ask_server(context: click.Context, ask: Callable[[AdminClient], _Names], limit_s: float = LIMIT_S) -> _Names:
    """Return what the server of a command line answers within a time; nothing if it does not."""
    # In a thread: after a failed call, the diagnosis of the connection may take longer.
    answers: queue.SimpleQueue[_Names] = queue.SimpleQueue()

    def run() -> None:
        try:
            with AdminClient(_settings(context).resolve(context.params.get("server")), timeout_s=limit_s) as client:
                answers.put(ask(client))
        except (FedplatError, ValueError, OSError):
            answers.put([])

    threading.Thread(target=run, name="completion", daemon=True).start()
    try:
        return answers.get(timeout=limit_s)
    except queue.Empty:
        return []


def _settings(context: click.Context) -> Settings:
    """Return the options given before the command; a completion neither runs their callback nor makes paths of them."""
    given = context.find_root().params
    profile, ca = given.get("profile"), given.get("ca")
    return Settings(
        server=given.get("server"),
        profile=Path(profile) if profile else None,
        ca=Path(ca) if ca else None,
        insecure=bool(given.get("insecure")),
    )
