"""The daemon, the dashboard, the database and a webhook's receiver are killed in turn: no event is lost.

The log of the test has the seconds from the return of each to the page with the present state.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Generator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from fedplat.admin import AdminClient, submission
from fedplat.errors import FedplatError
from fedplat.job import parse_job
from support import processes
from support.daemons import initial_model
from support.databases import execute_sql, in_thread
from support.inbox import Inbox
from support.jobs import job_file
from support.own_postgres import Postgres

pytestmark = pytest.mark.slow
JOB = job_file("observed")


class Dashboard:
    """`fedplat dashboard` as a process, and a session of it."""

    def __init__(self, server: processes.Server) -> None:
        self._command = [str(processes.BIN / "fedplat"), "--profile", str(server.profile_path), "dashboard"]
        self._address = f"127.0.0.1:{processes.free_port()}"
        self._cookie = ""
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [*self._command, "--no-browser", "--listen", self._address]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        code = self._process.stdout.readline().strip().partition("code=")[2]
        headers = {"Origin": f"http://{self._address}", "Content-Type": "application/x-www-form-urlencoded"}
        with self._request("POST", "/login", urllib.parse.urlencode({"code": code}), headers) as response:
            self._cookie = (response.getheader("Set-Cookie") or "").partition(";")[0]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def shows(self, status: str) -> bool:
        """Whether the page of the jobs has the present status of the last one."""
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            self._request("GET", "/jobs", "", {"Cookie": self._cookie}) as response,
        ):
            text = response.read().decode()
            return response.status == 200 and status in text.partition("<tbody>")[2].partition("</tr>")[0]
        return False

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: str, headers: dict[str, str]
    ) -> Generator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self._address, timeout=processes.PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                yield response


@pytest.fixture
def postgres() -> Generator[Postgres]:
    with tempfile.TemporaryDirectory(prefix="fedplat-postgres-") as folder:
        server = Postgres(Path(folder))
        yield server
        server.close()


def change(admin: AdminClient) -> tuple[str, str]:
    """Makes four events: a job is created, started and cancelled, with its attempt. Returns its id and status."""
    job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), initial_model())).job_id
    admin.cancel(job)
    return job, "cancelled"


@pytest.mark.fault("F2")
def test_nothing_is_lost_while_one_after_the_other_is_away(tmp_path: Path, postgres: Postgres) -> None:
    in_thread(execute_sql(postgres.url, "CREATE DATABASE fed"))
    url = make_url(postgres.url).set(database="fed").render_as_string(hide_password=False)
    receiver = Inbox()
    receiver.start()
    log = logging.getLogger(__name__)
    with contextlib.ExitStack() as stack:
        stack.callback(receiver.stop)
        options = ("--database", url, "--webhook-network", "127.0.0.0/8", "--lease", "2")
        server = stack.enter_context(processes.server(tmp_path / "server", *options))
        admin = stack.enter_context(server.admin())
        dashboard = Dashboard(server)
        dashboard.start()
        stack.callback(dashboard.kill)
        admin.add_webhook(receiver.url, [])

        def returned(what: str) -> None:
            began = time.monotonic()
            admin.wait_until_ready(processes.PATIENCE_S)
            _, status = change_when_possible(admin)
            processes.until(lambda: dashboard.shows(status), f"the page after the return of the {what}")
            log.warning("%s: the page after %.1f s", what, time.monotonic() - began)

        change(admin)
        server.kill()
        server.start()
        returned("daemon")
        dashboard.kill()
        change(admin)
        dashboard.start()
        returned("dashboard")
        postgres.order("kill")
        processes.until(lambda: not is_writable(admin), "the failure of the database")
        postgres.order("start")
        returned("database")
        receiver.stop()
        change(admin)
        receiver.start()
        returned("receiver")
        processes.until(lambda: expected(admin) <= receiver.sequences(), "every event at the receiver", 120.0)


def is_writable(admin: AdminClient) -> bool:
    try:
        change(admin)
    except FedplatError:
        return False
    return True


def change_when_possible(admin: AdminClient) -> tuple[str, str]:
    """Repeats until the database accepts writes again."""
    done: list[tuple[str, str]] = []

    def try_it() -> bool:
        with contextlib.suppress(FedplatError):
            done.append(change(admin))
        return bool(done)

    processes.until(try_it, "a change of a job")
    return done[0]


def expected(admin: AdminClient) -> set[int]:
    """The numbers of all events after the webhook was added; they have no gaps."""
    numbers = [event.sequence for event in admin.iter_events()]
    assert numbers == list(range(1, len(numbers) + 1))
    added = next(event.sequence for event in admin.iter_events() if event.type == "webhook.added")
    return {number for number in numbers if number > added}
