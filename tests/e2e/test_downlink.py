"""A job with a downlink, with a real daemon and real clients: who downloads what."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.cli import submission
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.rounds.invariants.records import StoredJob
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, Task, TrainResult
from fedplat_client._work import transfer
from fedplat_server.verify import inspection
from fedplat_server.verify.checker import verify
from support import processes
from support.jobs import write_job

pytestmark = pytest.mark.slow

JOB = write_job(
    "downlink",
    population="fleet",
    trainer="noise",
    rounds=4,
    selection={"goal": 2, "min_fraction": 1.0},
    retry={"base_s": 0.05},
    compression={"uplink": {"codec": "eden", "bits": 4}, "downlink": {"codec": "eden", "bits": 4}},
)
LEAVES_IN = 3
"""The round in which one client leaves, and a fresh one takes its place."""


def initial() -> Parameters:
    rng = np.random.default_rng(0)
    return Parameters.from_arrays(
        {"weight": rng.normal(size=(300, 500)).astype("f4"), "steps": np.array([1, 5])}, "max"
    )


class Member:
    """A client in a thread; `hold`: it trains in that round until the server stops it."""

    def __init__(self, name: str, ticket: str, folder: Path, hold: int = 0) -> None:
        self.reached = threading.Event()
        self._hold = hold
        self.client = Client.from_ticket(ticket, data_dir=folder / name)
        self.client.add_trainer("noise", self._train)
        self._thread = threading.Thread(target=self.client.run, name=name)

    def _train(self, task: Task) -> TrainResult:
        if task.round == self._hold and not self.reached.is_set():
            self.reached.set()
            while True:
                task.progress(0.5)  # ends the task, once the attempt is over
                threading.Event().wait(0.02)
        rng = np.random.default_rng(task.round)
        task.parameters["weight"] += rng.normal(size=(300, 500)).astype("f4")
        task.parameters["steps"] += 1
        return TrainResult(parameters=task.parameters, num_examples=1)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.client.stop()
        if self._thread.ident is not None:
            self._thread.join()


@contextlib.contextmanager
def stopped_at_the_end(*members: Member) -> Generator[None]:
    try:
        yield
    finally:
        for member in members:
            member.stop()


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, int]]]:
    """What each client of this process has downloaded: digests and bytes."""
    noted: dict[str, list[tuple[str, int]]] = defaultdict(list)
    download = transfer.download

    def counted(connection: Any, source: transfer.Source, part: Any, control: Any) -> None:
        before = part.size
        download(connection, source, part, control)
        noted[threading.current_thread().name].append((source.digest, part.size - before))

    monkeypatch.setattr(transfer, "download", counted)
    return noted


async def job_of(folder: Path) -> StoredJob:
    async with inspection.snapshot(f"sqlite:///{folder / 'fedplat.sqlite'}") as connection:
        (job,) = [unit async for unit in inspection.units(connection) if isinstance(unit, StoredJob)]
    return job


def test_who_holds_a_version_downloads_the_delta_to_the_next(
    tmp_path: Path, downloads: dict[str, list[tuple[str, int]]]
) -> None:
    folder = tmp_path / "server"
    with processes.server(folder) as server, server.admin() as admin:
        ticket = server.ticket("fleet", 3)
        stays, leaves = (Member(name, ticket, tmp_path, LEAVES_IN) for name in ("stays", "leaves"))
        joins = Member("joins", ticket, tmp_path)
        with stopped_at_the_end(stays, leaves, joins):
            stays.start()
            leaves.start()
            job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), initial())).job_id
            processes.until(lambda: stays.reached.is_set() and leaves.reached.is_set(), "round 3")
            joins.start()
            processes.until(lambda: admin.status().num_waiting == 1, "the client that joins")
            leaves.stop()
            for _ in admin.watch_job(job):
                pass
        assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
        shown = [version.delta_size_bytes for version in admin.list_versions(job)]
        exported = tmp_path / "model.safetensors"
        admin.export_model(job, None, exported)
    assert asyncio.run(verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings == []
    versions = asyncio.run(job_of(folder)).versions
    whole = [(version.digest, version.size_bytes) for version in versions]
    delta = [(version.delta_digest, version.delta_size_bytes) for version in versions]
    assert shown == [size_bytes for _, size_bytes in delta]
    assert downloads == {
        "stays": [whole[0], delta[1], delta[2], delta[3]],
        "leaves": [whole[0], delta[1], delta[2]],
        "joins": [whole[2], delta[3]],
    }
    assert all(7 * small < large for (_, small), (_, large) in zip(delta[1:], whole[1:], strict=True))
    assert Parameters.open(exported)["steps"].tolist() == [5, 9]
