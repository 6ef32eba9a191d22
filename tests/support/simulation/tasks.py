"""Tasks for engines: small ones, with clients of different sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import nn

from fedplat.model import Parameters
from fedplat.pytorch.training import Learner, LocalOptions
from fedplat.simulation.data.federation import Federation
from fedplat.simulation.engines.client_trainer import ClientTraining
from fedplat.simulation.engines.interface import ClientTask, Engine, LocalUpdate

SIDE = 12
SIZES = (23, 5, 10, 31, 1, 12)
"""Examples of the clients: more and less than a batch of 10, and a single one."""


def logistic_regression() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 4))


def two_layers() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4)
    )


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 12),
        nn.ReLU(),
        nn.Linear(12, 4),
    )


def federation(sizes: Sequence[int] = SIZES, seed: int = 0) -> Federation:
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    inputs = rng.standard_normal((total + 40, 1, SIDE, SIDE), dtype=np.float32)
    targets = rng.integers(0, 4, total + 40)
    parts = np.split(rng.permutation(total), np.cumsum(sizes)[:-1])
    held_out = [total + np.arange(1 + client % 4) for client in range(len(sizes))]
    return Federation(inputs, targets, parts, inputs[total:], targets[total:], held_out=held_out)


def task(make: Callable[[], nn.Module] = two_layers, sizes: Sequence[int] = SIZES, **config: Any) -> ClientTraining:
    options = LocalOptions.from_config({"epochs": 2, "batch_size": 10, "learning_rate": 0.1, **config})
    return ClientTraining(federation(sizes), Learner(model=make), options)


def rounds(engine: Engine, model: Parameters, tasks: Sequence[Sequence[ClientTask]]) -> list[list[LocalUpdate]]:
    """Rounds of federated averaging, each with the works given; results are asked for in the order of the works."""
    found: list[list[LocalUpdate]] = []
    for version, cohort in enumerate(tasks):
        engine.publish(version, model)
        engine.begin(cohort)
        trained = [engine.result(task) for task in cohort]
        engine.retire(version)
        model = model.copy()
        for each in trained:
            model = model.plus(each.update.to_vector() / np.float32(len(trained)))
        found.append(trained)
    return found


def personal() -> ClientTraining:
    given = task(momentum=0.5)
    return given._replace(learner=Learner(model=two_layers, personal=("5.*",)))
