"""Jobs on one real server: forty clients of two jobs, a slow client of an asynchronous job, a limit of privacy."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.model import Parameters
from fedplat.privacy.steps import StepCharge
from fedplat.pytorch.dp import epsilon
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, PrivacyLimit, Task, TrainResult
from fedplat_client.trainers.torch import TorchTrainer
from support import deployment, processes
from support.clients import at_work
from support.jobs import write_job

pytestmark = pytest.mark.slow

NUM_CLIENTS = 40
ROUNDS = 8
GOAL = 16


class Crowd:
    """Clients in threads. Each adds its own number to every weight, and records its tasks."""

    def __init__(self, clients: list[Client]) -> None:
        self.trained: Counter[tuple[str, int, int]] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self.clients = clients
        for number, client in enumerate(clients):
            for name in ("first", "second"):
                client.add_trainer(name, lambda task, number=number: self._train(task, number))

    def _train(self, task: Task, number: int) -> TrainResult:
        with self._lock:
            self.trained[(task.job_id, task.round, task.attempt)] += 1
            if len(set(task.parameters["weight"].tolist())) != 1:
                self.wrong.append(f"{task.job_id} round {task.round}: a torn model")
        task.parameters["weight"][:] += number
        return TrainResult(parameters=task.parameters, num_examples=1, metrics={"number": float(number)})


def test_forty_clients_and_two_jobs(server: processes.Server, tmp_path: Path) -> None:
    """On SQLite, nothing is locked (which the server's log would show at the end), and no report is lost."""
    crowd = Crowd(deployment.clients_of(server, "crowd", tmp_path, NUM_CLIENTS))
    zeros = Parameters.from_arrays({"weight": np.zeros(64, np.float32)})
    texts = [
        write_job(
            name,
            population="crowd",
            trainer=name,
            rounds=ROUNDS,
            selection={"goal": GOAL, "min_fraction": 0.5},
            deadlines={"selection_s": 10, "training_s": 60},
        )
        for name in ("first", "second")
    ]
    with server.admin() as admin:
        with at_work(crowd.clients):
            jobs = [deployment.submit(admin, text, zeros) for text in texts]
            for job in jobs:
                deployment.completed(admin, job)
        for job in jobs:
            check_rounds(admin.list_rounds(job, all_attempts=True), job, crowd)
            final = deployment.exported(admin, job, tmp_path)["weight"]
            np.testing.assert_allclose(final, sum_of_means(server.folder, job), rtol=1e-5)
    assert not crowd.wrong


def check_rounds(attempts: Sequence[admin_pb2.Round], job: str, crowd: Crowd) -> None:
    """Every client that trained reported, and every report was merged: no client was late, lost or surplus."""
    committed = [attempt for attempt in attempts if attempt.phase == admin_pb2.ATTEMPT_PHASE_COMMITTED]
    assert [attempt.round for attempt in committed] == list(range(1, ROUNDS + 1))
    for attempt in committed:
        assert attempt.reported == attempt.assigned == crowd.trained[(job, attempt.round, attempt.attempt)]
        assert attempt.reported >= GOAL // 2


def sum_of_means(folder: Path, job: str) -> float:
    """The final model from the database alone: the sum over rounds of the mean of the clients' numbers."""
    with contextlib.closing(sqlite3.connect(folder / "fedplat.sqlite")) as database:
        rows = database.execute(
            "SELECT round, number, json_extract(metrics, '$.number') FROM assignments"
            " WHERE job_id = ? AND state = 'MERGED'",
            (job,),
        ).fetchall()
    numbers: dict[tuple[int, int], list[float]] = {}
    for round_, attempt, number in rows:
        numbers.setdefault((round_, attempt), []).append(number)
    return sum(float(np.mean(merged)) for merged in numbers.values())


BUFFERED = write_job(
    "async",
    population="async",
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
    """A client in a thread. Number 0 ends its first task when there is version 3, number 2 the one with that never."""

    def __init__(self, number: int, client: Client, go: threading.Event) -> None:
        self.began_with: list[int] = []
        self._number, self._go = number, go
        self.client = client
        client.add_trainer("steps", self._train)

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


def reference() -> np.ndarray:
    """Versions 1 to 3 are made of clients 1 and 2, version 4 of 1 and of the slow one: s(3) = 0.5."""
    x = np.zeros(SIZE, np.float32)
    for version in range(3):
        x = x + np.float32(0.5) * (delta(1, version) + delta(2, version)) / 2
    return x + np.float32(0.5) * (np.float32(0.5) * delta(0, 0) + delta(1, 3)) / 2


def test_a_slow_clients_update_is_merged_three_versions_later(server: processes.Server, tmp_path: Path) -> None:
    go = threading.Event()
    clients = deployment.clients_of(server, "async", tmp_path, 3)
    members = [Member(number, client, go) for number, client in enumerate(clients)]
    with server.admin() as admin:
        job = deployment.submit(admin, BUFFERED, Parameters.from_arrays({"weight": np.zeros(SIZE, np.float32)}))
        with at_work(clients[:1]):
            try:
                processes.until(lambda: members[0].began_with == [0], "the slow client's first task")
                with at_work(clients[1:]):
                    processes.until(lambda: admin.show_job(job).round == 3, "version 3")
                    go.set()
                    deployment.completed(admin, job)
            finally:
                go.set()
        rounds = admin.list_rounds(job)
        found = deployment.exported(admin, job, tmp_path)["weight"]
    np.testing.assert_allclose(found, reference(), rtol=1e-5, atol=1e-6)
    assert [(one.reported, one.mean_staleness, one.max_staleness) for one in rounds] == [
        *[(2, 0.0, 0)] * 3,
        (2, 1.5, 3),
    ]


PRIVATE_ROUNDS = 4
PRIVATE = write_job(
    "private",
    population="private",
    trainer="private",
    rounds=PRIVATE_ROUNDS,
    selection={"goal": 2, "min_fraction": 0.5},
    config={
        "epochs": 1,
        "batch_size": 5,
        "learning_rate": 0.1,
        "dp": "flat",
        "dp_noise_multiplier": 1.0,
        "dp_max_grad_norm": 1.0,
        "dp_delta": 1e-5,
    },
)
PER_ROUND = StepCharge(1.0, 0.25, 4)


def cost(rounds: int) -> float:
    return epsilon([PER_ROUND] * rounds, 1e-5)


def test_a_client_declines_what_is_beyond_its_limit_and_the_server_is_told_why(
    server: processes.Server, tmp_path: Path
) -> None:
    """The limit of examples' privacy is that of the data's owner; the job continues without the client."""
    limits = [PrivacyLimit(max_epsilon=limit, delta=1e-5) for limit in (cost(PRIVATE_ROUNDS) * 1.01, cost(2) * 1.01)]
    data = TensorDataset(torch.ones(20, 3), torch.ones(20, 1))
    model = Parameters.from_arrays({"weight": np.zeros((1, 3), "f4"), "bias": np.zeros(1, "f4")})
    clients = deployment.clients_of(server, "private", tmp_path, len(limits))
    for client, limit in zip(clients, limits, strict=True):
        loss = nn.functional.mse_loss
        trainer = TorchTrainer(model=lambda: nn.Linear(3, 1), loss=loss, data=data, device="cpu", private=limit)
        client.add_trainer("private", trainer)
    with server.admin() as admin:
        job = deployment.submit_file(admin, tmp_path, PRIVATE, model)
        with at_work(clients):
            events = deployment.completed(admin, job)
    reports = [event for event in events if event.entity == "assignment" and event.to_state == "REPORTED"]
    failures = [event for event in events if event.entity == "assignment" and event.to_state == "FAILED"]
    assert [len([each for each in reports if each.round == number]) for number in range(1, 5)] == [2, 2, 1, 1]
    epsilons = {(each.client_id, each.round): each.metrics["epsilon"] for each in reports}
    assert sorted(epsilons.values()) == pytest.approx(sorted(map(cost, (1, 1, 2, 2, 3, 4))), rel=1e-6)
    assert {event.round for event in failures} == {3}
    # it is not asked again in round 4
    assert all(
        "exceed epsilon" in event.reason and "the limit of the data's owner" in event.reason for event in failures
    )
    spent = [json.loads((tmp_path / f"client-{n}" / "privacy.json").read_text()) for n in range(len(limits))]
    assert [content["entries"][0]["charges"][0]["num_steps"] for content in spent] == [16, 8]
