"""The trainers of two silos, each with plays of its own.

    torchrun --nproc-per-node 2 -m fedplat_client run --parallel shard=2 --trainer plays=silos.py:sharded
    torchrun --nproc-per-node 2 -m fedplat_client run --parallel pipeline=2,micro_batches=4 \
        --trainer plays=silos.py:pipelined

How a silo divides the model is its own matter, not the job's. For the comparison each silo has a second trainer, for a
single process with the whole model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.utils.data import TensorDataset

import llama
import trainer
from fedplat_client import Task, TrainResult
from fedplat_client.task import Scalar
from fedplat_client.trainers.torch import TorchTrainer

BATCH_SIZE = 16


def make_silo(name: str) -> TorchTrainer:
    """Create the trainer of a silo; the command line divides it."""

    def data(_: Task) -> TensorDataset:
        rows = trainer.load_part(name)
        # Whole batches only, so that their parts are equal: `take_turns` cannot divide others as ranks do.
        return TensorDataset(*(each[: len(rows) // BATCH_SIZE * BATCH_SIZE] for each in rows.tensors))

    def optimizer(parameters: Iterable[nn.Parameter], config: Mapping[str, Scalar]) -> torch.optim.Optimizer:
        return trainer.make_adamw(parameters, float(config["learning_rate"]), name)

    return TorchTrainer(model=trainer.make_model, data=data, optimizer=optimizer, plan=llama.PLAN, device="cpu")


def take_turns(silo: TorchTrainer, num_parts: int) -> Callable[[Task], TrainResult]:
    """Return a trainer for one process that computes the parts of each batch one after the other, as ranks do."""

    def train(task: Task) -> TrainResult:
        config = {**task.config, "batch_size": BATCH_SIZE // num_parts, "accumulate": num_parts}
        return silo(dataclasses.replace(task, config=config))

    return train


sharded, pipelined = make_silo("sharded"), make_silo("pipelined")
sharded_alone = take_turns(sharded, 2)  # each of two ranks computes a half
pipelined_alone = take_turns(pipelined, 4)  # with as many micro-batches
