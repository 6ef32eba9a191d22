"""Events and webhooks with the real commands, over kills of the server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import standardwebhooks

from fedplat.cli import submission
from fedplat.job import parse_job
from support import processes
from support.daemons import initial_model
from support.jobs import job_file

pytestmark = pytest.mark.slow
NETWORK = ("--webhook-network", "127.0.0.0/8")
JOB = job_file("told")


class Inbox:
    """A receiver in a thread, of the standard library: the requests that it has accepted."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                inbox.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Write nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hooks"

    def sequences(self) -> set[int]:
        return {json.loads(body)["data"].get("sequence", 0) for _, body in self.requests}


@pytest.fixture
def inbox() -> Generator[Inbox]:
    made = Inbox()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def fedplat(server: processes.Server, *arguments: str, status: int = 0) -> str:
    command = [str(processes.BIN / "fedplat"), "--profile", str(server.profile_path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=processes.PATIENCE_S)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def submit(server: processes.Server) -> str:
    with server.admin() as admin:
        return submission.submit(admin, submission.Submission(JOB, parse_job(JOB), initial_model())).job_id


def test_the_commands_of_webhooks(tmp_path: Path, inbox: Inbox) -> None:
    with processes.server(tmp_path / "server", *NETWORK) as server:
        added = json.loads(fedplat(server, "webhook", "add", inbox.url, "--type", "job.started", "--json"))
        mine, secret = added["webhook"]["webhook_id"], added["secret"]
        assert "accepted: 204" in fedplat(server, "webhook", "test", mine)
        job = submit(server)
        processes.until(lambda: len(inbox.requests) == 2, "the event of the job")
        for headers, body in inbox.requests:
            standardwebhooks.Webhook(secret).verify(body.decode(), headers)
        assert json.loads(inbox.requests[1][1])["data"]["job_id"] == job
        listed = fedplat(server, "webhook", "list", "-o", "wide")
        assert re.search(rf"{mine} +0 .* 204 .* job.started +{re.escape(inbox.url)}", listed)
        assert secret not in listed
        assert re.search(rf"{mine} +\d+ +job.started +delivered +1 ", fedplat(server, "webhook", "deliveries", mine))
        assert "without TLS" not in fedplat(server, "webhook", "add", "https://10.0.0.1/", status=1)
        inbox.server.shutdown()
        inbox.server.server_close()
        assert "not accepted: connection refused" in fedplat(server, "webhook", "test", mine, status=1)
        fedplat(server, "webhook", "remove", mine)
        assert "there are no webhooks" in fedplat(server, "webhook", "list")
        events = [json.loads(line) for line in fedplat(server, "events", "-n", "9", "--json").splitlines()]
        assert [event["type"] for event in events] == [
            *("operator.added", "webhook.added", "job.created", "job.started", "webhook.removed")
        ]
        assert secret not in server.log_text()


@pytest.mark.fault("F2")
def test_a_server_that_is_killed_loses_no_event(tmp_path: Path, inbox: Inbox) -> None:
    """`fedplat events --follow` and a webhook both get every event once the server is back."""
    with processes.server(tmp_path / "server", *NETWORK) as server:
        fedplat(server, "webhook", "add", inbox.url)
        command = [str(processes.BIN / "fedplat"), "--profile", str(server.profile_path)]
        following = subprocess.Popen(
            [*command, "events", "--follow", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert following.stdout is not None
        seen = [json.loads(following.stdout.readline()) for _ in range(2)]
        for _ in range(3):
            with server.admin() as admin:
                job = submit(server)
                admin.cancel(job)
            server.kill()
            server.start()
            seen += [json.loads(following.stdout.readline()) for _ in range(4)]
        following.send_signal(signal.SIGINT)
        _, errors = following.communicate(timeout=processes.PATIENCE_S)
        assert following.returncode == 130
        assert errors.startswith("waiting for ")
        numbers = [event["sequence"] for event in seen]
        assert numbers == list(range(1, 15))
        assert [event["type"] for event in seen[2:6]] == [
            *("job.created", "job.started", "round.abandoned", "job.cancelled")
        ]
        processes.until(lambda: set(numbers[2:]) <= inbox.sequences(), "every event at the webhook")


def test_the_receiver_of_the_page_runs(tmp_path: Path) -> None:
    """The example of docs/operations.md, as it is there, receives a signed event and refuses a forged one."""
    page = (processes.ROOT / "docs" / "operations.md").read_text()
    found = re.search(r"<!-- file: receiver.py -->\n```python\n(.*?)```", page, flags=re.DOTALL)
    assert found is not None
    assert len([line for line in found[1].splitlines() if line]) <= 20
    port = processes.free_port()
    (tmp_path / "receiver.py").write_text(found[1].replace("8000", str(port)))
    with processes.server(tmp_path / "server", *NETWORK) as server:
        added = json.loads(fedplat(server, "webhook", "add", f"http://127.0.0.1:{port}/", "--json"))
        environment = {**os.environ, "WEBHOOK_SECRET": added["secret"], "PYTHONUNBUFFERED": "1"}
        receiver = subprocess.Popen(
            [sys.executable, str(tmp_path / "receiver.py")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            mine = added["webhook"]["webhook_id"]

            def accepted() -> bool:
                with server.admin() as admin:
                    return admin.test_webhook(mine).state == "delivered"

            processes.until(accepted, "the receiver to accept a test")
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == f"webhook.test {{'subject': '{mine}'}}\n"
            forged = json.loads(fedplat(server, "webhook", "add", f"http://127.0.0.1:{port}/", "--json"))
            refused = fedplat(server, "webhook", "test", forged["webhook"]["webhook_id"], status=1)
            assert "not accepted: 401" in refused
        finally:
            receiver.terminate()
            receiver.communicate()
