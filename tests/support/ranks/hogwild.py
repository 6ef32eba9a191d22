"""What the tests of Hogwild run: models whose workers share no weights, or all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.errors import TrainingError
from fedplat.job.tables import WarmStart
from fedplat.model import Parameters
from fedplat.pytorch import server
from fedplat.pytorch.distributed import Ranks
from fedplat.pytorch.distributed.shared_memory import share_vector
from fedplat.pytorch.parallel.parts import divide
from fedplat.pytorch.server import ServerTrainer, TrainingRun

DISJOINT_TABLE: dict[str, Any] = {"batch_size": 2, "learning_rate": 0.1, "method": "hogwild"}
TABLE: dict[str, Any] = {"trainer": "t", **DISJOINT_TABLE}
NUM_EXAMPLES, NUM_RANKS, WIDTH = 321, 2, 6
VICTIM, KILLED_AT = 1, 37


def warm(**changes: Any) -> WarmStart:
    return WarmStart(**(TABLE | changes))


def linear() -> nn.Module:
    """A module without weights that all examples use."""
    return nn.Linear(NUM_RANKS * WIDTH, 3, bias=False)


def disjoint_examples() -> TensorDataset:
    """Examples that have zeros in all columns but those of the rank that takes them, in a training of one epoch."""
    work = TrainingRun(options=warm(), num_ranks=NUM_RANKS)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.zeros(NUM_EXAMPLES, NUM_RANKS * WIDTH)
    for step in divide(work.plan(NUM_EXAMPLES, 1), NUM_RANKS, range(NUM_RANKS), work.seed):
        for part in filter(lambda part: part.share, step):
            columns = slice(part.rank * WIDTH, (part.rank + 1) * WIDTH)
            inputs[part.indices, columns] = torch.randn(len(part.indices), WIDTH, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (NUM_EXAMPLES,), generator=generator))


def noisy_examples() -> TensorDataset:
    """A linear function with noise of variance 1, which no model can learn."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_EXAMPLES, WIDTH, generator=generator)
    noise = torch.randn(NUM_EXAMPLES, 1, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + noise)


def dense() -> nn.Module:
    return nn.Linear(WIDTH, 1)


DENSE = ServerTrainer(model=dense, data=noisy_examples(), loss=nn.functional.mse_loss)
DISJOINT = ServerTrainer(model=linear, data=disjoint_examples())


def train(ranks: Ranks, trainer: ServerTrainer, work: TrainingRun) -> Parameters:
    """The model after a training."""
    model = trainer.learner.initial(1)
    trained = server.train(ranks, trainer, model, work)
    assert trained is not None
    assert np.isfinite(trained.losses).all()
    return model


def train_disjoint(ranks: Ranks, folder: str = "", **changes: Any) -> str:
    """The bytes of the model after a training in which ranks use different columns."""
    saved = Path(folder) if folder else None
    work = TrainingRun(options=warm(**changes), num_ranks=NUM_RANKS, checkpoints=saved)
    return train(ranks, DISJOINT, work).to_bytes().hex()


def train_dense(ranks: Ranks) -> str:
    """The bytes of the model after a training in which all ranks use all weights."""
    work = TrainingRun(options=warm(epochs=5, batch_size=4, learning_rate=0.02), num_ranks=NUM_RANKS)
    return train(ranks, DENSE, work).to_bytes().hex()


def die(ranks: Ranks, folder: str) -> str:
    """One worker is killed between two checkpoints; what the other one sees."""

    def note(done: int, total: int) -> None:
        if ranks.rank == VICTIM and done == KILLED_AT:
            while not Path(folder, "step-000000000030").exists():  # threads write it
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGKILL)

    work = TrainingRun(options=warm(checkpoint_every=10), num_ranks=NUM_RANKS, checkpoints=Path(folder), note=note)
    try:
        train(ranks, DISJOINT, work)
    except RuntimeError:  # or a class of it
        return "RuntimeError"
    raise AssertionError


def share(ranks: Ranks, size: int) -> dict[str, Any]:
    """What each rank reads after all have written into one vector, and the memory files that it maps afterwards."""
    vector = share_vector(ranks, size)
    assert vector is not None
    zeros = not vector.any()
    ranks.barrier()
    vector[ranks.rank :: ranks.size] = ranks.rank + 1
    ranks.barrier()
    values = vector.tolist()
    del vector
    mapped = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return {"zeros": zeros, "values": values, "mapped": sum("memfd:fedplat" in line for line in mapped)}


def without_shared_memory(ranks: Ranks) -> str:
    """What is said where the ranks are on different hosts, as far as one of them knows."""
    original = os.memfd_create

    def refuse(*_: object) -> int:
        raise OSError

    if ranks.rank == 1:
        os.memfd_create = refuse
    try:
        train_disjoint(ranks)
    except TrainingError as exc:
        return str(exc)
    finally:
        os.memfd_create = original
    raise AssertionError
