"""What operators do with a real server: webhooks, tracking of a job, and tickets that are of no use."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import standardwebhooks

from fedplat.model import Parameters
from fedplat.wire.auth import Ticket
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import EnrollmentError
from fedplat_server.auth import pki_folder
from fedplat_server.auth.tls import utc_now
from support import deployment, processes
from support.clients import add_one, at_work
from support.daemons import initial_model
from support.deployment import run_fedplat
from support.inbox import Inbox
from support.jobs import job_file, write_job

pytestmark = pytest.mark.slow


@pytest.fixture
def inbox() -> Generator[Inbox]:
    made = Inbox()
    made.start()
    yield made
    made.stop()


def test_the_commands_of_webhooks(server: processes.Server, inbox: Inbox) -> None:
    added = json.loads(run_fedplat(server, "webhook", "add", inbox.url, "--type", "job.started", "--json"))
    mine, secret = added["webhook"]["webhook_id"], added["secret"]
    assert "accepted: 204" in run_fedplat(server, "webhook", "test", mine)
    with server.admin() as admin:
        job = deployment.submit(admin, job_file("told"), initial_model())
    processes.until(lambda: len(inbox.requests) == 2, "the event of the job")
    for headers, body in inbox.requests:
        standardwebhooks.Webhook(secret).verify(body.decode(), headers)
    assert json.loads(inbox.requests[1][1])["data"]["job_id"] == job
    listed = run_fedplat(server, "webhook", "list", "-o", "wide")
    assert re.search(rf"{mine} +0 .* 204 .* job.started +{re.escape(inbox.url)}", listed)
    assert secret not in listed
    assert re.search(rf"{mine} +\d+ +job.started +delivered +1 ", run_fedplat(server, "webhook", "deliveries", mine))
    assert "without TLS" not in run_fedplat(server, "webhook", "add", "https://10.0.0.1/", status=1)
    inbox.stop()
    assert "not accepted: connection refused" in run_fedplat(server, "webhook", "test", mine, status=1)
    run_fedplat(server, "webhook", "remove", mine)
    assert "there are no webhooks" in run_fedplat(server, "webhook", "list")
    printed = run_fedplat(server, "events", "-n", "4", "--json").splitlines()
    assert [json.loads(line)["type"] for line in printed if line.startswith("{")] == [
        *("webhook.added", "job.created", "job.started", "webhook.removed")
    ]
    run_fedplat(server, "job", "cancel", job)
    assert secret not in server.log_text()


def test_the_receiver_of_the_page_runs(server: processes.Server, tmp_path: Path) -> None:
    """The example of docs/operations.md, as it is there, receives a signed event and refuses a forged one."""
    page = (processes.ROOT / "docs" / "operations.md").read_text()
    found = re.search(r"<!-- file: receiver.py -->\n```python\n(.*?)```", page, flags=re.DOTALL)
    assert found is not None
    assert len([line for line in found[1].splitlines() if line]) <= 20
    port = processes.free_port()
    (tmp_path / "receiver.py").write_text(found[1].replace("8000", str(port)))
    with server.admin() as admin:
        mine, forged = (admin.add_webhook(f"http://127.0.0.1:{port}/") for _ in range(2))
        names = [each.webhook.webhook_id for each in (mine, forged)]
        environment = {**os.environ, "WEBHOOK_SECRET": mine.secret, "PYTHONUNBUFFERED": "1"}
        receiver = subprocess.Popen(
            [sys.executable, str(tmp_path / "receiver.py")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            processes.until(lambda: admin.test_webhook(names[0]).state == "delivered", "the receiver to accept a test")
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == f"webhook.test {{'subject': '{names[0]}'}}\n"
            assert "not accepted: 401" in run_fedplat(server, "webhook", "test", names[1], status=1)
        finally:
            receiver.terminate()
            receiver.communicate()
            for name in names:
                admin.remove_webhook(name)


def steps_of(uri: str, name: str) -> dict[int, float]:
    from mlflow.tracking import MlflowClient

    client: Any = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tracked")
    if experiment is None:
        return {}
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) <= 1
    metrics = [metric for run in runs for metric in client.get_metric_history(run.info.run_id, name)]
    assert len({metric.step for metric in metrics}) == len(metrics)  # no round twice
    return {metric.step: metric.value for metric in metrics}


def test_a_watch_that_is_stopped_and_repeated_tracks_every_round_once(
    server: processes.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fedplat job watch --mlflow`, stopped in the middle of the job and repeated: MLflow has what the server has."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    uri, go_on = f"file:{tmp_path / 'store'}", threading.Event()

    def train(task: Task) -> TrainResult:
        if task.round >= 3:
            assert go_on.wait(processes.PATIENCE_S)
        return TrainResult(parameters=task.parameters, num_examples=1, metrics={"loss": 1.0 / task.round})

    text = write_job("tracked", population="tracked", trainer="linear", rounds=5)
    watch = [str(processes.BIN / "fedplat"), "--profile", str(server.profile_path)]
    watch += ["job", "watch", "tracked", "--mlflow", uri]
    clients = deployment.clients_of(server, "tracked", tmp_path, 1)
    clients[0].add_trainer("linear", train)
    with server.admin() as admin, at_work(clients):
        try:
            deployment.submit(admin, text, Parameters.from_arrays({"weight": np.zeros(3, np.float32)}))
            with subprocess.Popen(watch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as first:
                processes.until(lambda: set(steps_of(uri, "clients/loss")) == {1, 2}, "two rounds in MLflow")
                first.send_signal(signal.SIGINT)
                output, _ = first.communicate(timeout=processes.PATIENCE_S)
            assert first.returncode == 130, output
        finally:
            go_on.set()
        done = subprocess.run(watch, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        rounds = admin.list_rounds("tracked")
    assert steps_of(uri, "clients/loss") == {each.round: each.client_metrics["loss"] for each in rounds}
    assert steps_of(uri, "round/reported") == dict.fromkeys(range(1, 6), 1.0)


def client_of(ticket: str, folder: Path, **options: Any) -> Client:
    made = Client.from_ticket(ticket, data_dir=folder, options=ClientOptions(**options))
    made.add_trainer("add", add_one)
    return made


@pytest.mark.fault("F21", "F30")
def test_tickets_of_no_use(server: processes.Server, tmp_path: Path) -> None:
    with server.admin() as admin:
        used = Ticket.from_text(server.ticket("tickets"))
        with at_work([client_of(used.to_text(), tmp_path / "good")]):
            processes.until(lambda: deployment.num_waiting(admin, "tickets") == 1, "the client that uses a ticket")
        revoked = admin.create_enrollment("tickets", 1, 3600.0, server.address)
        admin.revoke_enrollment(revoked.enrollment.enrollment_id)
        expired = admin.create_enrollment("tickets", 1, 1e-6, server.address).ticket
    foreign = msgspec.structs.replace(Ticket.from_text(server.ticket("tickets")), population="other")
    unknown = msgspec.structs.replace(used, secret="x" * 43)
    cases = {
        "used up": used.to_text(),
        "revoked": revoked.ticket,
        "expired": expired,
        "another population": foreign.to_text(),
        "is unknown": unknown.to_text(),
    }
    for said, ticket in cases.items():
        with pytest.raises(EnrollmentError, match=said) as caught:
            client_of(ticket, tmp_path / said).run()
        assert "\n" not in str(caught.value)
        assert Ticket.from_text(ticket).secret not in str(caught.value)


def once(_: StopSignal, seconds: float) -> bool:
    """Stops instead of waiting."""
    return seconds > 0


def test_a_server_other_than_the_tickets_gets_nothing(
    server: processes.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its certificate is not from the authority that the ticket names."""
    stranger = pki_folder.certificate_pem(pki_folder.Authority.new(utc_now()).certificate).decode()
    ticket = msgspec.structs.replace(Ticket.from_text(server.ticket("tickets")), ca=stranger)
    with caplog.at_level("WARNING"):
        client_of(ticket.to_text(), tmp_path / "stranger", wait=once).run()
    (record,) = [record for record in caplog.records if record.name.startswith("fedplat_client")]
    assert "was not issued by a trusted authority" in record.getMessage()
    assert "\n" not in record.getMessage()
