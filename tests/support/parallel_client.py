"""A silo's own script, which torchrun starts in several processes: `parallel_client.py TICKET DATA_DIR`."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
from typing import Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat_client import Client, Task, TrainResult
from fedplat_client.trainers.torch import TorchTrainer

_CALLS = itertools.count()


def points() -> TensorDataset:
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def module() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def shaky_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fails once, on rank 1, in the middle of a training."""
    if os.environ["RANK"] == "1" and next(_CALLS) == 3:
        raise RuntimeError("the accelerator is on fire")
    return nn.functional.cross_entropy(outputs, targets)


def points_trainer(parallel: Literal["none", "data"]) -> TorchTrainer:
    return TorchTrainer(model=module, data=points(), seed=5, parallel=parallel)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    gc.disable()  # a failed training must close its connections itself, not when the collector happens to run
    client = Client.from_ticket(sys.argv[1], data_dir=sys.argv[2])
    client.add_trainer("points", points_trainer("data"))
    shaky = TorchTrainer(model=module, data=points(), loss=shaky_loss, parallel="data")

    @client.trainer("shaky")
    def train(task: Task) -> TrainResult:
        return shaky(task)

    client.run()


if __name__ == "__main__":
    main()
