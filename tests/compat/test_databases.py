"""A database and a data folder of each release, left in the middle of a round: this version continues and finishes."""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from compat import adding
from fedplat.admin import submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from support import processes, releases
from support.clients import at_work
from support.jobs import write_job
from support.releases import MAIN

pytestmark = [pytest.mark.slow, pytest.mark.fault("F28", "F29")]
NUM_CLIENTS = 3
ROUNDS = 3
JOB = write_job(
    "old",
    population="few",
    trainer="add",
    rounds=ROUNDS,
    selection={"goal": NUM_CLIENTS, "min_fraction": 1.0},
    aggregation={"rule": "fedavgm", "momentum": 0.5},
    deadlines={"heartbeat_s": 0.5},
    retry={"base_s": 0.1},
)


@pytest.fixture(params=["sqlite", "postgresql"])
def options(request: pytest.FixtureRequest) -> Generator[list[str]]:
    """The options of the server's commands for a database of each kind."""
    if request.param == "sqlite":
        yield []
    else:
        yield ["--database", request.getfixturevalue("empty_postgres")]


def test_a_round_of_a_release_is_finished(tmp_path: Path, release: releases.Release, options: list[str]) -> None:
    """In round 2 two of three clients have reported when the server of the release is killed."""
    in_training, go_on = threading.Event(), threading.Event()

    def make(ticket: str, number: int) -> Client:
        options = ClientOptions(first_backoff_s=0.1, max_backoff_s=1.0)
        client = Client.from_ticket(ticket, data_dir=tmp_path / f"client-{number}", options=options)

        def train(task: Task) -> TrainResult:
            if task.round == 2 and number == 0:
                in_training.set()
                assert go_on.wait(processes.PATIENCE_S)
            task.parameters["weight"][:] += 3.0 * number
            return TrainResult(parameters=task.parameters, num_examples=5)

        client.add_trainer("add", train)
        return client

    folder = tmp_path / "server"
    with processes.server(folder, *options, release=release) as server, server.admin() as admin:
        ticket = server.ticket("few", NUM_CLIENTS)
        with at_work([make(ticket, number) for number in range(NUM_CLIENTS)]):
            try:
                model = Parameters.from_arrays({"weight": np.zeros(16, np.float32)})
                job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model)).job_id
                assert in_training.wait(processes.PATIENCE_S)
                processes.until(lambda: admin.show_job(job).current.reported == NUM_CLIENTS - 1, "two reports")
                assert admin.status().software_version == release.name
                server.kill()
                assert len([path for path in (folder / "uploads").rglob("*") if path.is_file()]) >= NUM_CLIENTS - 1
                where = ["--data-dir", str(folder), *options]
                MAIN.run("fedplat-server", "db", "upgrade", *where)
                server.replace(MAIN)
                server.start()
            finally:
                go_on.set()
            processes.until(lambda: admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED, "the job's end")
        attempts = admin.list_rounds(job, all_attempts=True)
        assert [(each.round, each.attempt, each.merged) for each in attempts] == [
            (number, 1, NUM_CLIENTS) for number in range(1, ROUNDS + 1)
        ]
        admin.export_model(job, None, tmp_path / "final.safetensors")
    MAIN.run("fedplat-server", "verify", *where)
    velocity, expected = 0.0, 0.0
    for _ in range(ROUNDS):
        velocity = 0.5 * velocity + 3.0
        expected += velocity
    np.testing.assert_allclose(Parameters.open(tmp_path / "final.safetensors")["weight"], expected, rtol=1e-6)


def test_a_client_is_replaced_and_goes_back(tmp_path: Path, last: releases.Release) -> None:
    """Its folder (identity, cached models, the values that its codec left for later) is read by the other version.

    Each process ends after two rounds, and the next one continues with the folder: the last release, this version, and
    the last release again.
    """
    rounds = 6
    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        path = adding.write_project(tmp_path / "job", "replaced", "few", rounds)
        tickets = [server.ticket("few") for _ in range(adding.NUM_CLIENTS)]
        text = path.read_text()
        job = submission.submit(admin, submission.Submission(text, parse_job(text), adding.initial_model())).job_id
        for release in (last, MAIN, last):
            clients = [
                adding.start_client(release, number, tmp_path / f"client-{number}", ticket, "--max-tasks", "2")
                for number, ticket in enumerate(tickets)
            ]
            for client in clients:
                assert client.wait(processes.PATIENCE_S) == 0
        processes.until(lambda: admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED, "the job's end")
        assert len(admin.list_clients()) == adding.NUM_CLIENTS
        digest = admin.list_versions(job)[-1].model.digest
    assert digest == adding.digest_of(adding.expected_model(rounds))
