"""Asynchronous training with a real daemon and real clients: a slow one's update comes versions later."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from fedplat.cli import submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, Task, TrainResult
from fedplat_server.verify.checker import verify
from support import processes
from support.jobs import write_job

pytestmark = pytest.mark.slow

JOB = write_job(
    "async",
    population="fleet",
    trainer="steps",
    rounds=4,
    mode={"kind": "buffered", "concurrency": 3},
    selection={"goal": 2, "over_selection": 1.3, "min_fraction": 1.0},
    updates={"weighting": "uniform"},
    aggregation={"rule": "fedbuff", "learning_rate": 0.5},
)
SIZE = 500


def delta(number: int, version: int) -> np.ndarray:
    """What the client of this number adds to a version."""
    return np.random.default_rng([number, version]).normal(size=SIZE).astype("f4")


class Member:
    """A client in a thread. Number 0 is done with its first task when version 3 is there, number 2 with that never."""

    def __init__(self, number: int, ticket: str, folder: Path, go: threading.Event) -> None:
        self.began_with: list[int] = []
        self._number, self._go = number, go
        self._client = Client.from_ticket(ticket, data_dir=folder / f"client-{number}")
        self._client.add_trainer("steps", self._train)
        self._thread = threading.Thread(target=self._client.run, name=f"client-{number}")

    def _train(self, task: Task) -> TrainResult:
        version = task.round - 1
        self.began_with.append(version)
        if self._number == 0 and version == 0:
            assert self._go.wait(processes.PATIENCE_S)
        while self._number == 2 and version == 3:
            task.progress(0.5)  # ends the task, once the job has ended
            threading.Event().wait(0.02)
        task.parameters["weight"] += delta(self._number, version)
        return TrainResult(parameters=task.parameters, num_examples=1)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._client.stop()
        if self._thread.ident is not None:
            self._thread.join()


def reference() -> np.ndarray:
    """Versions 1 to 3 are made of clients 1 and 2, version 4 of 1 and of the slow one: s(3) = 0.5."""
    x = np.zeros(SIZE, np.float32)
    for version in range(3):
        x = x + np.float32(0.5) * (delta(1, version) + delta(2, version)) / 2
    return x + np.float32(0.5) * (np.float32(0.5) * delta(0, 0) + delta(1, 3)) / 2


def test_a_slow_clients_update_is_merged_three_versions_later(tmp_path: Path) -> None:
    folder, go = tmp_path / "server", threading.Event()
    initial = Parameters.from_arrays({"weight": np.zeros(SIZE, np.float32)})
    with processes.server(folder) as server, server.admin() as admin:
        ticket = server.ticket("fleet", 3)
        members = [Member(number, ticket, tmp_path, go) for number in range(3)]
        try:
            job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), initial)).job_id
            members[0].start()
            processes.until(lambda: members[0].began_with == [0], "the slow client's first task")
            for member in members[1:]:
                member.start()
            processes.until(lambda: admin.show_job(job).round == 3, "version 3")
            go.set()
            for _ in admin.watch_job(job):
                pass
        finally:
            go.set()
            for member in members:
                member.stop()
        assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
        rounds = admin.list_rounds(job)
        exported = tmp_path / "model.safetensors"
        admin.export_model(job, None, exported)
    np.testing.assert_allclose(Parameters.open(exported)["weight"], reference(), rtol=1e-5, atol=1e-6)
    assert [(one.reported, one.mean_staleness, one.max_staleness) for one in rounds] == [
        *[(2, 0.0, 0)] * 3,
        (2, 1.5, 3),
    ]
    assert asyncio.run(verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings == []
