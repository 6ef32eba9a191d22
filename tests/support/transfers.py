"""A client that adds 1 to a model, its update, and its stored models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedplat.model import Parameters
from fedplat_client import Client, Task, TrainResult

MakeClient = Callable[..., Client]


def add_one(task: Task) -> TrainResult:
    task.parameters["weight"] += np.float32(1)
    return TrainResult(parameters=task.parameters, num_examples=3)


def trained_update(base: Parameters) -> Parameters:
    trained = base.copy()
    trained["weight"] += np.float32(1)
    return trained.minus(base)


def run(client: Client, num_tasks: int = 1) -> None:
    client.add_trainer("digits", add_one)
    client.run(max_tasks=num_tasks)


def models(tmp_path: Path) -> Path:
    (folder,) = tmp_path.glob("data/*/demo/models")
    return folder
