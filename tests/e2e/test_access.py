"""Clients of the SDK against a real server: unusable tickets, a server other than the ticket's, a restart."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedplat.admin import AdminClient
from fedplat.auth import Ticket
from fedplat.cli import submission, watch
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import EnrollmentError
from fedplat_server.auth import ca
from fedplat_server.auth.tls import utc_now
from support import processes
from support.clients import at_work
from support.jobs import write_job

pytestmark = pytest.mark.slow

JOB = write_job("again", trainer="add", retry={"base_s": 0.1})


def add(task: Task) -> TrainResult:
    task.parameters["weight"][:] += 1.0
    return TrainResult(parameters=task.parameters, num_examples=1)


def client_of(ticket: str, folder: Path, **options: object) -> Client:
    made = Client.from_ticket(ticket, data_dir=folder, options=ClientOptions(**options))  # type: ignore[arg-type]
    made.add_trainer("add", add)
    return made


def once(_: StopSignal, seconds: float) -> bool:
    """Stops instead of waiting."""
    return seconds > 0


def run_job(admin: AdminClient) -> None:
    model = Parameters.from_arrays({"weight": np.zeros(4, np.float32)})
    job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model))
    ended = watch.follow(admin, job.job_id, watch.View(lambda _: None, lambda _: None))
    assert ended.status == admin_pb2.JOB_STATUS_COMPLETED


@pytest.mark.fault("F21", "F30")
def test_tickets_and_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        good = server.ticket("demo")
        client = client_of(good, tmp_path / "good", first_backoff_s=0.1, max_backoff_s=0.5)
        with at_work([client]):
            run_job(admin)
            server.kill()
            server.start()  # it has forgotten every session
            run_job(admin)
            assert len(admin.list_clients("demo")) == 1
        assert "session" not in caplog.text
        _tickets_of_no_use(admin, server, Ticket.from_text(good), tmp_path)
        _another_server(server, tmp_path, caplog)


def _tickets_of_no_use(admin: AdminClient, server: processes.Server, used: Ticket, folder: Path) -> None:
    revoked = admin.create_enrollment("demo", 1, 3600.0, server.address)
    admin.revoke_enrollment(revoked.enrollment.enrollment_id)
    expired = admin.create_enrollment("demo", 1, 1e-6, server.address).ticket
    foreign = msgspec.structs.replace(Ticket.from_text(server.ticket("demo")), population="other")
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
            client_of(ticket, folder / said).run()
        assert "\n" not in str(caught.value)
        assert Ticket.from_text(ticket).secret not in str(caught.value)


def _another_server(server: processes.Server, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The certificate is not from the authority that the ticket names: the client sends that server nothing."""
    stranger = ca.certificate_pem(ca.Authority.new(utc_now()).certificate).decode()
    ticket = msgspec.structs.replace(Ticket.from_text(server.ticket("demo")), ca=stranger)
    caplog.clear()
    with caplog.at_level("WARNING"):
        client_of(ticket.to_text(), folder / "stranger", wait=once).run()
    (record,) = [record for record in caplog.records if record.name.startswith("fedplat_client")]
    assert "was not issued by a trusted authority" in record.getMessage()
    assert "\n" not in record.getMessage()
