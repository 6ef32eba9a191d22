"""A command that follows the events of a server, and a webhook that receives them."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Generator
from typing import Any

from fedplat.admin import AdminClient
from support import deployment, processes
from support.daemons import initial_model
from support.inbox import Inbox
from support.jobs import job_file


class Watching:
    """`fedplat events --follow` and a webhook, which both get every event once a killed server is back."""

    def __init__(self, admin: AdminClient, following: subprocess.Popen[str], inbox: Inbox) -> None:
        self._admin, self._following, self._inbox = admin, following, inbox
        self._job = ""
        self.seen: list[dict[str, Any]] = []

    def change(self) -> None:
        """Make four events, the last ones before the server is killed."""
        self._job = deployment.submit(self._admin, job_file("told"), initial_model())
        self._admin.cancel(self._job)

    def check(self) -> None:
        """Read the events up to those of the last change."""
        assert self._following.stdout is not None
        mine: list[str] = []
        while "job.cancelled" not in mine:
            self.seen.append(json.loads(self._following.stdout.readline()))
            mine += [self.seen[-1]["type"]] * (self.seen[-1]["job_id"] == self._job)
        assert mine == ["job.created", "job.started", "round.abandoned", "job.cancelled"]

    def end(self) -> None:
        """None is missing, and none came twice."""
        self._following.send_signal(signal.SIGINT)
        out, errors = self._following.communicate(timeout=processes.PATIENCE_S)
        assert self._following.returncode == 130
        assert errors.startswith("waiting for ")
        events = [*self.seen, *map(json.loads, out.splitlines())]
        assert [event["type"] for event in events[:2]] == ["operator.added", "webhook.added"]
        numbers = [event["sequence"] for event in events]
        assert numbers == list(range(1, len(numbers) + 1))
        processes.until(lambda: set(numbers[2:]) <= self._inbox.sequences(), "every event at the webhook")


@contextlib.contextmanager
def watched(server: processes.Server) -> Generator[Watching]:
    """From the first events, which are those of the operator and of the webhook."""
    inbox = Inbox()
    inbox.start()
    try:
        with server.admin() as admin:
            admin.add_webhook(inbox.url)
            command = [str(processes.BIN / "fedplat"), "--profile", str(server.profile_path)]
            command += ["events", "--follow", "--json"]
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as following:
                try:
                    yield Watching(admin, following, inbox)
                finally:
                    following.kill()
    finally:
        inbox.stop()
