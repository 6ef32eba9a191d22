"""Silos of two processes that have one model in parts: one sharded, under torchrun, one a pipeline, under mpirun."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedplat.admin import AdminClient
from fedplat.cli import submission
from fedplat.model import Parameters
from fedplat.pytorch.training import Learner
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Task
from support import layout_client, processes
from support.jobs import write_job
from support.model_parallel.llama import Llama

CONFIG: dict[str, Any] = {
    **{"epochs": 2, "batch_size": 8, "learning_rate": 0.2, "momentum": 0.9},
    **{"algorithm": "fedprox", "mu": 0.1},
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
TESTS = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@contextmanager
def silo(server: processes.Server, folder: Path, population: str, launcher: list[str], layout: str) -> Generator[Any]:
    """A client that is two processes."""
    environment = [
        *("env", f"PYTHONPATH={TESTS}", "GLOO_SOCKET_IFNAME=lo", f"TMPDIR={folder}"),
        *("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"),
    ]
    program = [layout_client.__file__, server.ticket(population), str(folder / "client"), layout]
    with processes.processes([[*environment, *launcher, *program]], folder / "client.log") as running:
        yield running[0]
        if running[0].poll() is None:
            running[0].terminate()
            running[0].wait(processes.PATIENCE_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("silo")
    for name in ("sharded", "pipelined"):
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[processes.Server]:
    with processes.server(folder / "server") as server:
        yield server


@pytest.fixture(scope="module")
def sharded(server: processes.Server, folder: Path) -> Iterator[Path]:
    with silo(server, folder / "sharded", "sharded", TORCHRUN, "shard=2"):
        yield folder / "sharded"


def start_model() -> Parameters:
    return Learner(model=Llama).initial(1)


def completed(admin: AdminClient, folder: Path, population: str, trainer: str, **tables: Any) -> tuple[str, Parameters]:
    """A job that has come to its end, and its model."""
    (folder / "model.safetensors").write_bytes(start_model().to_bytes())
    text = write_job(
        f"{population}-{trainer}",
        population=population,
        trainer=trainer,
        rounds=2,
        model={"initial": "model.safetensors"},
        config=CONFIG,
        **tables,
    )
    (folder / "job.toml").write_text(text)
    job = submission.submit(admin, submission.load(folder / "job.toml")).job_id
    for _ in admin.watch_job(job):
        pass
    assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED
    admin.export_model(job, None, folder / "out.safetensors")
    return job, Parameters.from_bytes((folder / "out.safetensors").read_bytes())


def of_one_process() -> Parameters:
    expected, trainer = start_model(), layout_client.tokens_trainer("none")
    for number in (1, 2):
        trainer(Task(name="tokens", parameters=expected, config=CONFIG, round=number))
    return expected


def assert_close(found: Parameters, expected: Parameters) -> None:
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)


def test_a_sharded_silo_learns_what_replicas_and_one_process_learn(
    server: processes.Server, sharded: Path, tmp_path: Path
) -> None:
    with server.admin() as admin:
        _, found = completed(admin, tmp_path, "sharded", "tokens")
        _, replicas = completed(admin, tmp_path, "sharded", "replicas")
        assert len(admin.list_clients()) == 1
    assert found == replicas  # two parts: the same bits
    assert_close(found, of_one_process())
    assert not list(sharded.glob("fedplat-model-*"))


def test_a_process_that_fails_leaves_no_other_one_waiting(
    server: processes.Server, folder: Path, tmp_path: Path
) -> None:
    """It fails in the first training of its process, whose groups PyTorch would keep in caches of meshes."""
    place = folder / "shaky"
    place.mkdir()
    with silo(server, place, "shaky", TORCHRUN, "shard=2"), server.admin() as admin:
        job, _ = completed(admin, tmp_path, "shaky", "shaky")
        assert len(admin.list_rounds(job, all_attempts=True)) == 3  # the first round took a second attempt
    failed = "ClientError: the training failed on rank 1: RuntimeError: the accelerator is on fire"
    assert failed in (place / "client.log").read_text()
    assert not list(place.glob("fedplat-model-*"))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun, of Debian's package openmpi-bin")
def test_a_pipelined_silo_under_mpirun_trains_and_evaluates_and_ends_with_its_first_lost_rank(
    server: processes.Server, folder: Path, tmp_path: Path
) -> None:
    place = folder / "pipelined"
    evaluation = {"every": 1}
    clients = {"evaluator": "tokens", "goal": 1, "min_fraction": 1.0}
    with silo(server, place, "pipelined", MPIRUN, "pipeline=2") as launcher, server.admin() as admin:
        _, found = completed(
            admin, tmp_path, "pipelined", "tokens", evaluation=evaluation, **{"evaluation.clients": clients}
        )
        assert_close(found, of_one_process())
        assert "An evaluation with rank 0 started." in (place / "client.log").read_text()
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        last = next(each for each in ranks if each.environ().get("OMPI_COMM_WORLD_RANK") == "1")
        os.kill(last.pid, signal.SIGKILL)
        assert processes.exit_code(launcher, processes.PATIENCE_S, place / "client.log")
        psutil.wait_procs(ranks, processes.PATIENCE_S)
        assert not any(each.is_running() for each in ranks)
    assert not list(place.glob("fedplat-model-*"))
