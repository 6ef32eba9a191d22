"""The same learners in a simulation and on a deployed server with real clients: equal models, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.simulation.api import simulate
from fedplat.simulation.data import Federation
from fedplat.simulation.federated.training import training_seed
from fedplat_client import Task
from fedplat_client.task import TrainFunction
from fedplat_client.trainers.learner import LearnerTrainer
from fedplat_client.trainers.sklearn import SklearnTrainer
from support import deployment, processes
from support.clients import at_work
from support.jobs import write_job
from support.learners import Centroids

ROUNDS, NUM_CLIENTS, SEED = 3, 2, 5
RNG = np.random.default_rng(9)
LABELS = np.arange(60) % 3
INPUTS = (RNG.normal(size=(60, 4)) + LABELS[:, None]).astype(np.float32)
PARTS = np.split(RNG.permutation(60), [25])
"""The sum of two updates does not depend on which of them arrives first."""
LIT = """
import torch
from lightning import LightningModule
from torch import nn


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.job_config["learning_rate"])


def initial():
    torch.manual_seed(1)
    return Lit()
"""
Make = Callable[[int, Path], TrainFunction]


def seed_of(client: int) -> Callable[[Task], int]:
    """The seeds of the simulation: each client takes part in every round."""
    return lambda task: training_seed(SEED, client, task.round)


def sklearn_trainer(estimator: str, **options: Any) -> Make:
    def make(client: int, folder: Path) -> TrainFunction:
        part = PARTS[client]
        return SklearnTrainer(
            estimator=estimator,
            features=4,
            classes=3,
            options=options,
            data=(INPUTS[part], LABELS[part]),
            seed=seed_of(client),
        )

    return make


def lightning_trainer(client: int, folder: Path) -> TrainFunction:
    pytest.importorskip("lightning")
    from fedplat.config import user_code
    from fedplat_client.trainers.lightning import LightningTrainer

    part, module = PARTS[client], user_code.load("lit.py:Lit", folder)
    return LightningTrainer(module=module, data=(INPUTS[part], LABELS[part]), device="cpu", seed=seed_of(client))


def own_trainer(client: int, folder: Path) -> TrainFunction:
    part = PARTS[client]
    return LearnerTrainer(learner=Centroids(features=4, classes=3), data=(INPUTS[part], LABELS[part]))


def huggingface_trainer(client: int, folder: Path) -> TrainFunction:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from fedplat.pytorch.huggingface import ArrayExamples
    from fedplat_client.trainers.huggingface import HuggingFaceTrainer
    from support import language

    part = PARTS[client]
    data = ArrayExamples((INPUTS[part], LABELS[part]), language.make_example)
    arguments = {"per_device_train_batch_size": 4}
    return HuggingFaceTrainer(
        model=language.make_adapted, data=data, arguments=arguments, device="cpu", seed=seed_of(client)
    )


SKLEARN = 'learner = "sklearn"\nfeatures = 4\nclasses = 3\n'
CASES: dict[str, tuple[str, dict[str, Any], Make]] = {
    "sgd": (
        f'{SKLEARN}estimator = "sklearn.linear_model:SGDClassifier"\noptions = {{ loss = "log_loss" }}\n',
        {"epochs": 2, "learning_rate": 0.05, "learning_rate_decay": 0.9},
        sklearn_trainer("sklearn.linear_model:SGDClassifier", loss="log_loss"),
    ),
    "perceptron": (
        f'{SKLEARN}estimator = "sklearn.neural_network:MLPClassifier"\noptions = {{ hidden_layer_sizes = [6] }}\n',
        {"epochs": 2, "batch_size": 8, "learning_rate": 0.01},
        sklearn_trainer("sklearn.neural_network:MLPClassifier", hidden_layer_sizes=[6]),
    ),
    "bayes": (
        f'{SKLEARN}estimator = "sklearn.naive_bayes:GaussianNB"\n',
        {},
        sklearn_trainer("sklearn.naive_bayes:GaussianNB"),
    ),
    "lightning": (
        'learner = "lightning"\nmodule = "lit.py:Lit"\n',
        {"epochs": 2, "batch_size": 8, "learning_rate": 0.01},
        lightning_trainer,
    ),
    "huggingface": (
        'learner = "huggingface"\nmodule = "support.language:make_adapted"\nexample = "support.language:make_example"\n'
        "arguments = { per_device_train_batch_size = 4 }\n",
        {"max_steps": 4, "learning_rate": 0.01, "keep_optimizer": True, "schedule": "job", "learning_rate_decay": 0.9},
        huggingface_trainer,
    ),
    "own": ('learner = "support.learners:Centroids"\nfeatures = 4\nclasses = 3\n', {}, own_trainer),
}


def write(name: str, model: str, config: dict[str, Any]) -> str:
    return write_job(
        name,
        population="learners",
        trainer=name,
        rounds=ROUNDS,
        selection={"goal": NUM_CLIENTS, "min_fraction": 1.0},
        config=config,
        more=f"[simulation]\nseed = {SEED}\n[simulation.model]\n{model}",
    )


def first_model(name: str, folder: Path, make: Make) -> Parameters:
    if name == "lightning":
        from fedplat import initial

        return initial.resolve("lit.py:initial", folder)
    if name == "huggingface":
        return make(0, folder)._learner.initial(3)  # type: ignore[attr-defined]
    return make(0, folder).learner.initial(3)  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_server_computes_what_the_simulation_did(server: processes.Server, tmp_path: Path, name: str) -> None:
    model, config, make = CASES[name]
    (tmp_path / "lit.py").write_text(LIT)
    start = first_model(name, tmp_path, make)
    if name == "huggingface":
        config = config | {"base_sha256": make(0, tmp_path)._learner.base_sha256()}  # type: ignore[attr-defined]
    clients = deployment.clients_of(server, "learners", tmp_path, NUM_CLIENTS)
    for number, client in enumerate(clients):
        client.add_trainer(name, make(number, tmp_path))
    with server.admin() as admin, at_work(clients):
        job = deployment.submit_file(admin, tmp_path, write(name, model, config), start)
        deployment.completed(admin, job)
        deployed = deployment.exported(admin, job, tmp_path)
    federation = Federation(INPUTS, LABELS, PARTS, INPUTS[:0], LABELS[:0])
    simulated = simulate(tmp_path / "job.toml", {"simulation.engine": "loop"}, data=federation).model
    assert simulated is not None
    assert simulated != start
    assert deployed.to_bytes() == simulated.to_bytes()
