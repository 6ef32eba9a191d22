"""Forty clients and two jobs at once on one server with SQLite: nothing is locked, no report is lost."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import Counter
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

NUM_CLIENTS = 40
ROUNDS = 8
GOAL = 16


def write(name: str) -> str:
    return write_job(
        name,
        population="crowd",
        trainer=name,
        rounds=ROUNDS,
        selection={"goal": GOAL, "min_fraction": 0.5},
        deadlines={"selection_s": 10, "training_s": 60},
    )


class Crowd:
    """Clients in threads. Each adds its own number to every weight, and records its tasks."""

    def __init__(self, ticket: str, folder: Path) -> None:
        self._ticket = ticket
        self.trained: Counter[tuple[str, int, int]] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._clients = [self._make(folder, number) for number in range(NUM_CLIENTS)]

    def _make(self, folder: Path, number: int) -> Client:
        client = Client.from_ticket(self._ticket, data_dir=folder / str(number))

        def train(task: Task) -> TrainResult:
            with self._lock:
                self.trained[(task.job_id, task.round, task.attempt)] += 1
                if len(set(task.parameters["weight"].tolist())) != 1:
                    self.wrong.append(f"{task.job_id} round {task.round}: a torn model")
            task.parameters["weight"][:] += number
            return TrainResult(parameters=task.parameters, num_examples=1, metrics={"number": float(number)})

        client.add_trainer("first", train)
        client.add_trainer("second", train)
        return client

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        return at_work(self._clients)


def submit(admin: AdminClient, name: str) -> str:
    text = write(name)
    model = Parameters.from_arrays({"weight": np.zeros(64, np.float32)})
    return submission.submit(admin, submission.Submission(text, parse_job(text), model)).job_id


def test_forty_clients_and_two_jobs(tmp_path: Path) -> None:
    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        crowd = Crowd(server.ticket("crowd", NUM_CLIENTS), tmp_path / "clients")
        with crowd.at_work():
            jobs = [submit(admin, "first"), submit(admin, "second")]
            for job in jobs:
                for _ in admin.watch_job(job):
                    pass
        for job in jobs:
            assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
            check_rounds(admin.list_rounds(job, all_attempts=True), job, crowd)
            admin.export_model(job, None, tmp_path / f"{job}.safetensors")
    assert not crowd.wrong
    assert "database is locked" not in server.log_text()
    check_models(tmp_path, jobs)


def check_rounds(attempts: object, job: str, crowd: Crowd) -> None:
    """Every client that trained reported, and every report was merged: no client was late, lost or surplus."""
    rounds: list[admin_pb2.Round] = list(attempts)  # type: ignore[call-overload]
    committed = [attempt for attempt in rounds if attempt.phase == admin_pb2.ATTEMPT_PHASE_COMMITTED]
    assert [attempt.round for attempt in committed] == list(range(1, ROUNDS + 1))
    for attempt in committed:
        assert attempt.reported == attempt.assigned == crowd.trained[(job, attempt.round, attempt.attempt)]
        assert attempt.reported >= GOAL // 2


def check_models(folder: Path, jobs: list[str]) -> None:
    """Recomputes each final model from the database alone: the sum over rounds of the mean of the clients' numbers."""
    with contextlib.closing(sqlite3.connect(folder / "server" / "fedplat.sqlite")) as database:
        for job in jobs:
            rows = database.execute(
                "SELECT round, number, json_extract(metrics, '$.number') FROM assignments"
                " WHERE job_id = ? AND state = 'MERGED'",
                (job,),
            ).fetchall()
            numbers: dict[tuple[int, int], list[float]] = {}
            for round_, attempt, number in rows:
                numbers.setdefault((round_, attempt), []).append(number)
            expected = sum(float(np.mean(merged)) for merged in numbers.values())
            final = Parameters.open(folder / f"{job}.safetensors")["weight"]
            np.testing.assert_allclose(final, expected, rtol=1e-5)
