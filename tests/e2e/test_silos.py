"""Silos of two processes: with a model in each, with one in parts under torchrun, and with a pipeline under mpirun."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedplat.admin import AdminClient
from fedplat.model import Parameters
from fedplat.pytorch.training import Learner
from fedplat_client import Task
from fedplat_client.trainers.torch import TorchTrainer
from support import deployment, layout_client, processes
from support.jobs import write_job
from support.model_parallel.llama import Llama

CONFIG: dict[str, Any] = {
    **{"epochs": 2, "batch_size": 8, "learning_rate": 0.2, "momentum": 0.9},
    **{"algorithm": "fedprox", "mu": 0.1},
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
TESTS = Path(__file__).resolve().parents[1]
FAILED = "ClientError: the training failed on rank 1: RuntimeError: the accelerator is on fire"

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
def sharded(server: processes.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a silo that divides its larger model."""
    folder = tmp_path_factory.mktemp("sharded")
    with silo(server, folder, "sharded", TORCHRUN, "shard=2"):
        yield folder


ON_A_BASE = Learner(model=layout_client.on_a_base, share="trained")


def start_model(trainer: str) -> Parameters:
    if trainer == "shared":
        return ON_A_BASE.initial(1)
    return Learner(model=layout_client.small_module if "points" in trainer else Llama).initial(1)


def config_of(trainer: str) -> dict[str, Any]:
    return CONFIG | {"base_sha256": ON_A_BASE.base_sha256()} if trainer == "shared" else CONFIG


def submitted(
    admin: AdminClient, folder: Path, population: str, trainer: str, config: dict[str, Any], **tables: Any
) -> str:
    text = write_job(
        f"{population}-{trainer}", population=population, trainer=trainer, rounds=2, config=config, **tables
    )
    return deployment.submit_file(admin, folder, text, start_model(trainer))


def completed(admin: AdminClient, folder: Path, population: str, trainer: str, **tables: Any) -> tuple[str, Parameters]:
    """A job that has come to its end, and its model."""
    job = submitted(admin, folder, population, trainer, config_of(trainer), **tables)
    deployment.completed(admin, job)
    return job, deployment.exported(admin, job, folder)


def of_one_process(name: str, trainer: TorchTrainer, attempts: Sequence[int] = (1, 1)) -> Parameters:
    """The model after the attempts of the rounds that were committed, whose numbers are in the seeds of trainings."""
    expected = start_model(name)
    for number, attempt in enumerate(attempts, 1):
        trainer(Task(name=name, parameters=expected, config=config_of(name), round=number, attempt=attempt))
    return expected


def assert_close(found: Parameters, expected: Parameters, atol: float = 1e-5) -> None:
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=atol)


def test_two_processes_are_one_client_and_learn_what_one_would(
    server: processes.Server, sharded: Path, tmp_path: Path
) -> None:
    with server.admin() as admin:
        for name, trainer in (  # with a base, it stays in both processes
            ("points", layout_client.points_trainer("none")),
            ("shared", layout_client.shared_trainer("none")),
        ):
            job, found = completed(admin, tmp_path, "sharded", name)
            attempts = [each.attempt for each in admin.list_rounds(job)]  # the silo may join late
            assert_close(found, of_one_process(name, trainer, attempts), atol=1e-6)
        assert len(admin.list_clients("sharded")) == 1
    assert set(found) == {"2.weight", "2.bias"}


def test_a_cancelled_job_ends_the_training_in_all_processes(
    server: processes.Server, sharded: Path, tmp_path: Path
) -> None:
    log = sharded / "client.log"

    def num_begun() -> int:
        return log.read_text().count("A training with rank 0 started.")

    with server.admin() as admin:
        before = num_begun()
        job = submitted(admin, tmp_path, "sharded", "points", CONFIG | {"epochs": 1_000_000})
        processes.until(lambda: num_begun() > before, "a training of rank 1")
        admin.cancel(job)
        completed(admin, tmp_path, "sharded", "points")
    assert "Rank 0 stopped the training." in log.read_text()


def test_a_process_that_fails_leaves_no_other_one_waiting(
    server: processes.Server, sharded: Path, tmp_path: Path
) -> None:
    with server.admin() as admin:
        job, _ = completed(admin, tmp_path, "sharded", "shaky-points")
        assert len(admin.list_rounds(job, all_attempts=True)) == 3  # the first round took a second attempt
        assert len(admin.list_clients("sharded")) == 1
    assert FAILED in (sharded / "client.log").read_text()


def test_a_sharded_silo_learns_what_replicas_and_one_process_learn(
    server: processes.Server, sharded: Path, tmp_path: Path
) -> None:
    with server.admin() as admin:
        _, found = completed(admin, tmp_path, "sharded", "tokens")
        _, replicas = completed(admin, tmp_path, "sharded", "replicas")
        assert len(admin.list_clients("sharded")) == 1
    assert found == replicas  # two parts: the same bits
    assert_close(found, of_one_process("tokens", layout_client.tokens_trainer("none")))
    assert not list(sharded.glob("fedplat-model-*"))


def test_a_process_that_fails_with_a_part_of_the_model_leaves_no_other_one_waiting(
    server: processes.Server, tmp_path: Path
) -> None:
    """It fails in the first training of its process, whose groups PyTorch would keep in caches of meshes."""
    with silo(server, tmp_path, "shaky", TORCHRUN, "shard=2"), server.admin() as admin:
        job, _ = completed(admin, tmp_path, "shaky", "shaky")
        assert len(admin.list_rounds(job, all_attempts=True)) == 3  # the first round took a second attempt
    assert FAILED in (tmp_path / "client.log").read_text()
    assert not list(tmp_path.glob("fedplat-model-*"))


def test_a_silo_whose_rank_is_killed_is_started_again_and_learns_what_one_process_learns(
    server: processes.Server, tmp_path: Path
) -> None:
    restarting = [*TORCHRUN, "--max-restarts", "1"]
    with silo(server, tmp_path, "mortal", restarting, "shard=2"), server.admin() as admin:
        job, found = completed(admin, tmp_path, "mortal", "mortal", deadlines={"heartbeat_s": 1.0})
        attempts = [each.attempt for each in admin.list_rounds(job)]
        assert attempts[0] > 1
        assert len(admin.list_clients("mortal")) == 1
    assert (tmp_path / "client.log").read_text().count("ready") == 4
    assert_close(found, of_one_process("mortal", layout_client.tokens_trainer("none"), attempts))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun, of Debian's package openmpi-bin")
def test_a_pipelined_silo_under_mpirun_trains_and_evaluates_and_ends_with_its_first_lost_rank(
    server: processes.Server, tmp_path: Path
) -> None:
    evaluation = {"every": 1}
    clients = {"evaluator": "tokens", "goal": 1, "min_fraction": 1.0}
    with silo(server, tmp_path, "pipelined", MPIRUN, "pipeline=2") as launcher, server.admin() as admin:
        _, found = completed(
            admin, tmp_path, "pipelined", "tokens", evaluation=evaluation, **{"evaluation.clients": clients}
        )
        assert_close(found, of_one_process("tokens", layout_client.tokens_trainer("none")))
        assert "An evaluation with rank 0 started." in (tmp_path / "client.log").read_text()
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        last = next(each for each in ranks if each.environ().get("OMPI_COMM_WORLD_RANK") == "1")
        os.kill(last.pid, signal.SIGKILL)
        assert processes.exit_code(launcher, processes.PATIENCE_S, tmp_path / "client.log")
        psutil.wait_procs(ranks, processes.PATIENCE_S)
        assert not any(each.is_running() for each in ranks)
    assert not list(tmp_path.glob("fedplat-model-*"))
