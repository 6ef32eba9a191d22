"""SCAFFOLD, EASGD and personal layers with a real daemon and clients that are stopped and started again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.admin import AdminClient
from fedplat.aggregate.drift import without_control
from fedplat.cli import job_files
from fedplat.errors import FedplatError
from fedplat.model import Parameters
from fedplat.pytorch.training import Learner
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, EvaluateResult, Task
from fedplat_client.trainers.torch import TorchTrainer
from support import deployment, elastic_client, processes
from support.clients import at_work
from support.jobs import write_job

Wide = npt.NDArray[np.float64]
NUM_CLIENTS = 3
RNG = np.random.default_rng(4)
INPUTS = [(RNG.normal(size=(12, 3)) * scale).astype("f4") for scale in (0.4, 0.9, 1.5)]
TARGETS = [(x @ RNG.normal(size=(3, 1))).astype("f4") for x in INPUTS]


def write(name: str, rounds: int, more: str) -> str:
    return write_job(
        name,
        population="fleet",
        trainer=name,
        rounds=rounds,
        model={"initial": f"{name}.safetensors"},
        selection={"goal": 3, "min_fraction": 1.0},
        updates={"weighting": "uniform"},
        config={"epochs": 8, "batch_size": 0, "learning_rate": 0.1},
        more=more,
    )


SCAFFOLD = 'algorithm = "scaffold"\n[aggregation]\nrule = "scaffold"\nnum_clients = 3'
ELASTIC = (
    'algorithm = "easgd"\nrho = 2.0\n[aggregation]\nrule = "easgd"\n[evaluation]\nevery = {rounds}\n'
    '[evaluation.clients]\nevaluator = "elastic"\ngoal = 3\nmin_fraction = 1.0'
)
PERSONAL = '[evaluation]\nevery = 100\n[evaluation.clients]\nevaluator = "personal"\ngoal = 3\nmin_fraction = 1.0'


def with_head() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))


@contextlib.contextmanager
def fleet(server: processes.Server, folder: Path, trainer: str, make: Callable[[int], TorchTrainer]) -> Generator[None]:
    """Clients at work, with the data folders that they have had before."""
    clients = deployment.clients_of(server, "fleet", folder, NUM_CLIENTS)
    for number, client in enumerate(clients):
        client.add_trainer(trainer, made := make(number))
        client.add_evaluator(trainer, made.evaluate)
    with at_work(clients):
        yield


def until_round(admin: AdminClient, job: str, number: int) -> None:
    for event in admin.watch_job(job):
        if event.entity == "version" and event.round >= number:
            return


@pytest.mark.slow
def test_scaffold_finds_the_optimum_of_all_data_though_its_clients_are_restarted(
    server: processes.Server, tmp_path: Path
) -> None:
    optimum = np.linalg.lstsq(np.concatenate(INPUTS), np.concatenate(TARGETS), rcond=None)[0].T

    def trainer(number: int) -> TorchTrainer:
        return TorchTrainer(
            model=lambda: nn.Linear(3, 1, bias=False),
            loss=nn.functional.mse_loss,
            data=TensorDataset(torch.from_numpy(INPUTS[number]), torch.from_numpy(TARGETS[number])),
        )

    zeros = Parameters.from_arrays({"weight": np.zeros((1, 3), "f4")})
    with server.admin() as admin:
        with fleet(server, tmp_path, "scaffold", trainer):
            job = deployment.submit_file(admin, tmp_path, write("scaffold", 40, SCAFFOLD), zeros)
            until_round(admin, job, 15)
        with fleet(server, tmp_path, "scaffold", trainer):
            deployment.completed(admin, job)
        model = deployment.exported(admin, job, tmp_path)
    assert model.keys() == {"weight", "control/weight"}
    np.testing.assert_allclose(without_control(model)["weight"], optimum, atol=0.02)
    # The server's variate is the mean of the clients', which are their gradients; they add up to nothing there.
    np.testing.assert_allclose(model["control/weight"], np.zeros((1, 3)), atol=0.02)


@pytest.mark.slow
def test_personal_layers_never_travel_and_outlive_a_restart(server: processes.Server, tmp_path: Path) -> None:
    """Clients whose targets have opposite signs share a layer, and each has a head of its own."""
    signs = (1.0, -1.0, 1.0)
    direction = np.array([[1.0], [-2.0], [0.5]], "f4")
    learner = Learner(model=with_head, loss=nn.functional.mse_loss, personal=("1.*",))

    def trainer(number: int) -> TorchTrainer:
        inputs = torch.from_numpy(INPUTS[2])
        targets = torch.from_numpy(signs[number] * INPUTS[2] @ direction)
        return TorchTrainer(
            model=with_head, loss=nn.functional.mse_loss, personal=("1.*",), data=TensorDataset(inputs, targets)
        )

    with server.admin() as admin:
        with fleet(server, tmp_path, "personal", trainer):
            job = deployment.submit_file(admin, tmp_path, write("personal", 12, PERSONAL), learner.initial())
            until_round(admin, job, 11)
        with fleet(server, tmp_path, "personal", trainer):
            deployment.completed(admin, job)
        model = deployment.exported(admin, job, tmp_path)
        (last,) = (version for version in admin.list_versions(job) if version.round == 12)
    assert model.keys() == {"0.weight", "0.bias"}
    assert last.metrics["loss"] < 0.1  # no common head does better than the mean of the squared targets
    assert np.mean((INPUTS[2] @ direction) ** 2) > 1.0


@pytest.mark.slow
def test_elastic_exchanges_conserve_the_sum_though_clients_are_restarted(
    server: processes.Server, tmp_path: Path
) -> None:
    """Gradients are constant, so that each merged training moves the sum of all models by a known amount."""
    rounds, kept = 16, dict[int, Wide]()

    class Recording(TorchTrainer):
        def evaluate(self, task: Task) -> EvaluateResult:
            state = task.client_state.get("easgd")
            assert state is not None
            kept[self.seed] = state["weight"].astype("f8")
            return EvaluateResult(num_examples=1, metrics={"loss": 0.0})

    def trainer(number: int) -> TorchTrainer:
        return Recording(
            model=lambda: nn.Linear(3, 1, bias=False),
            loss=lambda outputs, targets: outputs.mean(),
            data=TensorDataset(torch.from_numpy(INPUTS[number]), torch.from_numpy(TARGETS[number])),
            seed=number,
        )

    start = Parameters.from_arrays({"weight": np.full((1, 3), 0.5, "f4")})
    more = ELASTIC.format(rounds=rounds)
    with server.admin() as admin:
        with fleet(server, tmp_path, "elastic", trainer):
            job = deployment.submit_file(admin, tmp_path, write("elastic", rounds, more), start)
            until_round(admin, job, 6)
        with fleet(server, tmp_path, "elastic", trainer):
            deployment.completed(admin, job)
        model = deployment.exported(admin, job, tmp_path)
        trained = [each for each in admin.list_rounds(job) if each.kind == admin_pb2.ATTEMPT_KIND_TRAIN]
    assert [each.client_metrics["centre_distance"] > 0.0 for each in trained] == [each.round > 1 for each in trained]
    assert kept.keys() == {0, 1, 2}
    moved = rounds * 8 * 0.1 * sum(inputs.astype("f8").mean(axis=0) for inputs in INPUTS)
    total = model["weight"].astype("f8") + sum(kept.values())
    np.testing.assert_allclose(total, np.full((1, 3), 4 * 0.5) - moved, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("point", elastic_client.POINTS)
def test_elastic_exchanges_conserve_the_sum_though_a_client_is_killed(
    server: processes.Server, tmp_path: Path, point: str
) -> None:
    """SIGKILL between the storage of the client's model and its report, or before it learns that this was accepted."""
    rounds, name, kept = 6, "elastic", list[Wide]()
    trainer = elastic_client.make_trainer()

    def evaluate(task: Task) -> EvaluateResult:
        state = task.client_state.get("easgd")
        assert state is not None
        kept.append(state["weight"].astype("f8"))
        return EvaluateResult(num_examples=1, metrics={"loss": 0.0})

    start = Parameters.from_arrays({"weight": np.full((1, 3), 0.5, "f4")})
    more = ELASTIC.format(rounds=rounds).replace("goal = 3", "goal = 1")
    population = f"killed-{point[:2]}"
    text = write(name, rounds, more).replace("goal = 3", "goal = 1").replace('"fleet"', f'"{population}"')
    ticket = server.ticket(population, 1)
    with server.admin() as admin:
        job = deployment.submit_file(admin, tmp_path, text, start)
        command = [sys.executable, elastic_client.__file__, ticket, str(tmp_path / "data"), point]
        done = subprocess.run(command, capture_output=True, text=True, timeout=processes.PATIENCE_S, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        client = Client.from_ticket(ticket, data_dir=tmp_path / "data")
        client.add_trainer(name, trainer)
        client.add_evaluator(name, evaluate)
        with at_work([client]):
            deployment.completed(admin, job)
        model = deployment.exported(admin, job, tmp_path)
    moved = rounds * 8 * 0.1 * elastic_client.INPUTS.astype("f8").mean(axis=0)
    total = model["weight"].astype("f8") + kept[-1]
    np.testing.assert_allclose(total, np.full((1, 3), 2 * 0.5) - moved, atol=2e-5)


def test_a_model_that_does_not_fit_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    wide = Parameters.from_arrays({"weight": np.zeros((1, 3), "f8")})
    (tmp_path / "scaffold.safetensors").write_bytes(wide.to_bytes())
    (tmp_path / "job.toml").write_text(write(name="scaffold", rounds=1, more=SCAFFOLD))
    with pytest.raises(FedplatError, match=r"scaffold.safetensors': tensor 'weight' is F64; SCAFFOLD needs F32"):
        job_files.load(tmp_path / "job.toml")
