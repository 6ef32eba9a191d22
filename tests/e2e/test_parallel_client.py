"""A silo's client on several processes, started by torchrun: one client for the server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.admin import AdminClient
from fedplat.cli import submission
from fedplat.model import Parameters
from fedplat.pytorch.training import Learner
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Task
from support import parallel_client, processes
from support.jobs import write_job

CONFIG: dict[str, Any] = {
    **{"epochs": 2, "batch_size": 10, "learning_rate": 0.1, "momentum": 0.9},
    **{"algorithm": "fedprox", "mu": 0.1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("silo")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[processes.Server]:
    """A daemon, and a client that is two processes."""
    program = [str(Path(parallel_client.__file__)), "{ticket}", str(folder / "client")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with processes.server(folder / "server") as server:
        ticket = server.ticket("silos")
        command = ["env", "GLOO_SOCKET_IFNAME=lo", *torchrun, *(part.format(ticket=ticket) for part in program)]
        log = folder / "client.log"
        with processes.processes([command], log) as running:
            yield server
            running[0].terminate()
            running[0].wait(processes.PATIENCE_S)


def start_model() -> Parameters:
    return Learner(model=parallel_client.module).initial(1)


def submitted(admin: AdminClient, folder: Path, name: str, config: dict[str, Any]) -> str:
    (folder / "model.safetensors").write_bytes(start_model().to_bytes())
    text = write_job(
        name, population="silos", trainer=name, rounds=2, model={"initial": "model.safetensors"}, config=config
    )
    (folder / "job.toml").write_text(text)
    return submission.submit(admin, submission.load(folder / "job.toml")).job_id


def completed(admin: AdminClient, folder: Path, name: str) -> tuple[str, Parameters]:
    """A job that has come to its end, and its model."""
    job = submitted(admin, folder, name, CONFIG)
    for _ in admin.watch_job(job):
        pass
    assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
    admin.export_model(job, None, folder / "out.safetensors")
    return job, Parameters.from_bytes((folder / "out.safetensors").read_bytes())


@pytest.mark.slow
def test_two_processes_are_one_client_and_learn_what_one_would(server: processes.Server, tmp_path: Path) -> None:
    expected, trainer = start_model(), parallel_client.points_trainer("none")
    for number in (1, 2):
        trainer(Task(name="points", parameters=expected, config=CONFIG, round=number))
    with server.admin() as admin:
        _, found = completed(admin, tmp_path, "points")
        assert len(admin.list_clients()) == 1
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_cancelled_job_ends_the_training_in_all_processes(
    server: processes.Server, folder: Path, tmp_path: Path
) -> None:
    log = folder / "client.log"

    def num_begun() -> int:
        return log.read_text().count("A training with rank 0 started.")

    with server.admin() as admin:
        before = num_begun()
        job = submitted(admin, tmp_path, "points", CONFIG | {"epochs": 1_000_000})
        processes.until(lambda: num_begun() > before, "a training of rank 1")
        admin.cancel(job)
        completed(admin, tmp_path, "points")
    assert "Rank 0 stopped the training." in log.read_text()


@pytest.mark.slow
def test_a_process_that_fails_leaves_no_other_one_waiting(
    server: processes.Server, folder: Path, tmp_path: Path
) -> None:
    with server.admin() as admin:
        job, _ = completed(admin, tmp_path, "shaky")
        rounds = admin.list_rounds(job, all_attempts=True)
        assert len(rounds) == 3  # the first round took a second attempt
        assert len(admin.list_clients()) == 1
    failed = "ClientError: the training failed on rank 1: RuntimeError: the accelerator is on fire"
    assert failed in (folder / "client.log").read_text()
