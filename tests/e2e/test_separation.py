"""Clients rest between their participations, also across a SIGKILL of the server."""

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

REST = 2
JOB = write_job(
    "separated",
    population="few",
    trainer="note",
    rounds=7,
    selection={
        "goal": 2,
        "min_fraction": 1.0,
        "min_separation": REST,
        "sampling": {"policy": "oort", "pacer_s": 10},
    },
    deadlines={"heartbeat_s": 0.2},
    retry={"base_s": 0.1},
)


@pytest.mark.fault("F2")
def test_no_client_is_drawn_too_soon_although_the_server_was_killed(tmp_path: Path) -> None:
    """Six clients for seven rounds of two: each has to take part in every third round, or the job starves."""
    in_training, go_on = threading.Event(), threading.Event()
    rounds: dict[int, set[int]] = {number: set() for number in range(6)}

    def trainer(number: int):
        def train(task: Task) -> TrainResult:
            rounds[number].add(task.round)
            if task.round == 3:
                in_training.set()
                assert go_on.wait(processes.PATIENCE_S)
            return TrainResult(parameters=task.parameters, num_examples=5, metrics={"loss": 1.0 + number})

        return train

    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        ticket = server.ticket("few", 6)
        clients = [Client.from_ticket(ticket, data_dir=tmp_path / str(number)) for number in range(6)]
        for number, client in enumerate(clients):
            client.add_trainer("note", trainer(number))
        with at_work(clients):
            try:
                model = Parameters.from_arrays({"weight": np.zeros(4, np.float32)})
                job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model))
                assert in_training.wait(processes.PATIENCE_S)
                server.kill()
                go_on.set()
                server.start()
                ended = watch.follow(admin, job.job_id, watch.View(lambda _: None, lambda _: None))
            finally:
                go_on.set()
        assert ended.status == admin_pb2.JOB_STATUS_COMPLETED, ended
    groups = [{number for number, took in rounds.items() if round_ in took} for round_ in range(1, 8)]
    assert all(len(group) == 2 for group in groups)
    assert groups[0] | groups[1] | groups[2] == set(range(6))
    assert groups[3:6] == groups[:3]
    assert groups[6] == groups[0]
