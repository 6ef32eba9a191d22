"""A server with its dashboard, and clients that train when the test lets them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np

from fedplat.admin import AdminClient, submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat_client import Client, Task, TrainResult
from support import processes
from support.clients import at_work
from support.jobs import write_job

NUM_CLIENTS = 4
JOB = write_job(
    "digits",
    population="demo",
    trainer="add",
    rounds=500,
    selection={"goal": 2, "over_selection": 1.5},
    deadlines={"training_s": 600, "heartbeat_s": 0.2},
)


class Turns:
    """Lets clients train one by one: a round is complete when a test gives enough turns."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._count = 0
        self.is_over = False

    def give(self, count: int) -> None:
        self._turns.release(count)

    def train(self, task: Task) -> TrainResult:
        while not self._turns.acquire(timeout=0.05):
            if self.is_over or task.cancelled:
                raise RuntimeError("the test is over")
        with self._lock:
            self._count += 1
            count = self._count
        if count == 2:
            raise RuntimeError("the sensor <b>is not</b> connected")
        return TrainResult(parameters=task.parameters, num_examples=10 * count, metrics={"loss": 1.0 / count})


@dataclasses.dataclass
class Place:
    """A server with a dashboard, clients and a running job."""

    server: processes.Server
    admin: AdminClient
    port: int
    job: str
    turns: Turns
    clients: list[str]

    @property
    def paths(self) -> dict[str, str]:
        """The address of each page."""
        job, client = f"/jobs/{self.job}", f"/clients/{self.clients[0]}"
        lists = ("jobs", "fleet", "clients", "privacy", "audit", "enrollments", "operators", "alerts")
        named = {"overview": "/", "job": job, "rounds": f"{job}/rounds", "round": f"{job}/rounds/1", "client": client}
        return {**named, "numbers": f"{job}/charts/duration", **{name: f"/{name}" for name in lists}}

    @property
    def origin(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def complete_round(self) -> None:
        """Lets the clients train until one more round is committed."""
        before = self.admin.show_job(self.job).round

        def is_committed() -> bool:
            self.turns.give(1)
            return self.admin.show_job(self.job).round > before

        processes.until(is_committed, "a committed round")


@contextlib.contextmanager
def dashboard_server(folder: Path) -> Generator[Place]:
    """A server with a job of three committed rounds."""
    port, turns = processes.free_port(), Turns()
    with processes.server(folder / "server", "--dashboard", f"127.0.0.1:{port}") as server, server.admin() as admin:
        ticket = server.ticket("demo", NUM_CLIENTS)
        clients = [
            Client.from_ticket(ticket, data_dir=folder / str(number), labels={"region": "eu" if number % 2 else "us"})
            for number in range(NUM_CLIENTS)
        ]
        for client in clients:
            client.add_trainer("add", turns.train)
        with at_work(clients):
            model = Parameters.from_arrays({"weight": np.zeros(16, np.float32)})
            job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model)).job_id
            made = Place(server, admin, port, job, turns, [client.client_id for client in admin.list_clients()])
            try:
                for _ in range(3):
                    made.complete_round()
                processes.until(lambda: "the dashboard is ready" in server.log_text(), "the dashboard")
                yield made
            finally:
                turns.is_over = True
