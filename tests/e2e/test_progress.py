"""Heartbeats of SDK clients: operators see their progress, and the clients follow the server's deadlines."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from fedplat.admin import AdminClient
from fedplat.cli import submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, Task, TrainResult
from support import processes
from support.clients import at_work
from support.jobs import write_job

pytestmark = pytest.mark.slow

JOB = write_job(
    "long",
    population="two",
    trainer="add",
    selection={"goal": 2},
    deadlines={"training_s": 3600, "heartbeat_s": 0.2},
)


class Trainings:
    """Two trainings that report their progress, and wait."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.go_on = threading.Event()
        self._fractions = iter((0.25, 0.75))
        self._lock = threading.Lock()

    def train(self, task: Task) -> TrainResult:
        with self._lock:
            task.progress(next(self._fractions))
            self.tasks.append(task)
        assert self.go_on.wait(processes.PATIENCE_S)
        return TrainResult(parameters=task.parameters, num_examples=1)

    def have_left(self, least_s: float, most_s: float) -> bool:
        return len(self.tasks) == 2 and all(least_s < task.remaining_s <= most_s for task in self.tasks)


def is_known(admin: AdminClient, job: str) -> bool:
    """Whether both clients' heartbeats have arrived since the server was started."""
    progress = admin.show_job(job).current.progress
    if progress.num_known < 2:
        return False
    assert (progress.num_training, progress.median, progress.minimum) == (2, 0.5, 0.25)
    fractions = {client.client_id: client.progress for client in admin.list_clients()}
    assert sorted(fractions.values()) == [0.25, 0.75]
    assert fractions[progress.slowest_client_id] == 0.25
    return True


def move_deadlines(server: processes.Server, seconds: float) -> None:
    """Kills the server, moves its deadlines as a change of its wall clock would, and starts it again."""
    server.kill()
    with contextlib.closing(sqlite3.connect(server.folder / "fedplat.sqlite")) as connection, connection:
        connection.execute("UPDATE assignments SET deadline_unix_s = deadline_unix_s + ?", (seconds,))
    server.start()


@pytest.mark.fault("F2", "F18")
def test_a_restart_changes_deadlines_and_loses_progress_for_a_heartbeat(tmp_path: Path) -> None:
    trainings = Trainings()
    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        ticket = server.ticket("two", 2)
        clients = [Client.from_ticket(ticket, data_dir=tmp_path / str(n)) for n in range(2)]
        for client in clients:
            client.add_trainer("add", trainings.train)
        with at_work(clients):
            try:
                model = Parameters.from_arrays({"weight": np.zeros(16, np.float32)})
                job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model)).job_id
                processes.until(lambda: is_known(admin, job), "heartbeats with the progress")
                assert trainings.have_left(1200.0, 3600.0)
                move_deadlines(server, -2400.0)
                processes.until(lambda: trainings.have_left(0.0, 1200.0), "an earlier deadline")
                processes.until(lambda: is_known(admin, job), "heartbeats with the progress, after a restart")
                move_deadlines(server, 7200.0)
                processes.until(lambda: trainings.have_left(1200.0, 3600.0), "a later deadline, within training_s")
            finally:
                trainings.go_on.set()
            for _ in admin.watch_job(job):
                pass
        assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
