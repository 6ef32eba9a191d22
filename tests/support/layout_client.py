"""A silo's own script, which a launcher starts in several processes: `layout_client.py TICKET DATA_DIR LAYOUT`.

Its trainers have a model in parts, by the layout, or a whole one in each process ("replicas", "points").
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import sys
from typing import Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.parallel import Parallel
from fedplat.pytorch.distributed import find_rank
from fedplat_client import Client
from fedplat_client.trainers.torch import TorchTrainer
from support.model_parallel.llama import PLAN, Llama, examples

_CALLS = itertools.count()


def shaky_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Fails once, on the last rank, in the middle of a training."""
    place = find_rank()
    if place is not None and place.rank == place.size - 1 and next(_CALLS) == 3:
        raise RuntimeError("the accelerator is on fire")
    return nn.functional.cross_entropy(outputs, targets)


def mortal_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Kills the last rank in the middle of the first training, unless torchrun has started it again."""
    place, restarts = find_rank(), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if place is not None and place.rank == place.size - 1 and restarts == "0" and next(_CALLS) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(outputs, targets)


def tokens_trainer(parallel: Parallel | Literal["none", "data"]) -> TorchTrainer:
    return TorchTrainer(model=Llama, data=TensorDataset(*examples()), seed=5, parallel=parallel, plan=PLAN)


def points() -> TensorDataset:
    inputs = torch.randn(45, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def small_module() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def on_a_base() -> nn.Module:
    torch.manual_seed(4)
    module = small_module()
    module[0].requires_grad_(False)  # type: ignore[index]
    return module


def points_trainer(parallel: Literal["none", "data"]) -> TorchTrainer:
    return TorchTrainer(model=small_module, data=points(), seed=5, parallel=parallel)


def shared_trainer(parallel: Literal["none", "data"]) -> TorchTrainer:
    return TorchTrainer(model=on_a_base, share="trained", data=points(), seed=5, parallel=parallel)


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    gc.disable()  # a failed training must close its connections itself, not when the collector happens to run
    layout = Parallel.from_text(sys.argv[3])
    client = Client.from_ticket(sys.argv[1], data_dir=sys.argv[2])
    trainer = tokens_trainer(layout)
    client.add_trainer("tokens", trainer)
    client.add_evaluator("tokens", trainer.evaluate)
    client.add_trainer("replicas", tokens_trainer("data"))
    for name, loss in (("shaky", shaky_loss), ("mortal", mortal_loss)):
        failing = TorchTrainer(
            model=Llama, data=TensorDataset(*examples()), loss=loss, seed=5, parallel=layout, plan=PLAN
        )
        client.add_trainer(name, failing)
    client.add_trainer("points", points_trainer("data"))
    client.add_trainer("shared", shared_trainer("data"))
    client.add_trainer(
        "shaky-points", TorchTrainer(model=small_module, data=points(), loss=shaky_loss, parallel="data")
    )
    print("ready", os.getpid(), flush=True)
    client.run()


if __name__ == "__main__":
    main()
