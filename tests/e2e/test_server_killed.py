"""The server dies of SIGKILL in the middle of a training; started again by the same line, it finishes the job."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from fedplat.cli import submission, watch
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, Task, TrainResult
from support import processes
from support.clients import at_work
from support.jobs import write_job

pytestmark = pytest.mark.slow

ROUNDS = 6
JOB = write_job(
    "survivor",
    population="few",
    trainer="add",
    rounds=ROUNDS,
    selection={"goal": 3, "min_fraction": 1.0},
    deadlines={"heartbeat_s": 0.2},
    retry={"base_s": 0.1},
    aggregation={"rule": "fedavgm", "momentum": 0.5},
)


@pytest.mark.fault("F1", "F2")
def test_server_killed_in_training(tmp_path: Path) -> None:
    """FedAvgM, so that the optimizer's state must survive too: every client adds 1, hence v = 1, 1.5, 1.75, ..."""
    in_training, go_on = threading.Event(), threading.Event()

    def train(task: Task) -> TrainResult:
        if task.round == 3:
            in_training.set()
            assert go_on.wait(processes.PATIENCE_S)
        task.parameters["weight"][:] += 1.0
        return TrainResult(parameters=task.parameters, num_examples=5)

    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        ticket = server.ticket("few", 3)
        clients = [Client.from_ticket(ticket, data_dir=tmp_path / str(n)) for n in range(3)]
        for client in clients:
            client.add_trainer("add", train)
        with at_work(clients):
            try:
                model = Parameters.from_arrays({"weight": np.zeros(16, np.float32)})
                job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model))
                assert in_training.wait(processes.PATIENCE_S)
                server.kill()
                go_on.set()
                server.start()
                sequences: list[int] = []
                told: list[str] = []
                view = watch.View(lambda event: sequences.append(event.sequence), told.append)
                ended = watch.follow(admin, job.job_id, view)
            finally:
                go_on.set()
        assert ended.status == admin_pb2.JOB_STATUS_COMPLETED
        assert sequences == sorted(set(sequences))
        attempts = admin.list_rounds(job.job_id, all_attempts=True)
        assert [(attempt.round, attempt.attempt) for attempt in attempts] == [(n + 1, 1) for n in range(ROUNDS)]
        assert [version.model.version for version in admin.list_versions(job.job_id)] == list(range(ROUNDS + 1))
        admin.export_model(job.job_id, None, tmp_path / "final.safetensors")
    velocity, expected = 0.0, 0.0
    for _ in range(ROUNDS):
        velocity = 0.5 * velocity + 1.0
        expected += velocity
    np.testing.assert_allclose(Parameters.open(tmp_path / "final.safetensors")["weight"], expected, rtol=1e-6)
