"""The model, the plays and an optimizer, as the server's trainer and the silos use them.

    fedplat-server run --trainer plays=examples/large/trainer.py:trainer

The folder of a run (`LARGE_FOLDER`) has its settings; there each process notes the bytes of its tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import llama
import plays
from fedplat import Learner, Parameters
from fedplat.job.tables import ServerLearning
from fedplat.pytorch.server import ServerTrainer

FOLDER = Path(os.environ.get("LARGE_FOLDER", "."))


def read_settings() -> dict[str, Any]:
    """Return the configuration, the text and the number of its characters that are used."""
    path = FOLDER / "settings.json"
    given: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {"config": str(llama.CONFIG), "text": str(plays.find_text()), "num_characters": 80_000} | given


SETTINGS = read_settings()
CONFIG = llama.read_config(Path(SETTINGS["config"]))


def make_model() -> llama.LlamaModel:
    """Create the module."""
    return llama.LlamaModel(CONFIG)


def initial() -> Parameters:
    """Create the initial model. The job file names this function."""
    return Learner(model=make_model).initial(seed=1)


def load_part(name: str) -> TensorDataset:
    """Return the rows of the server, of a silo, or those that are held out."""
    return plays.load_part(name, Path(SETTINGS["text"]), SETTINGS["num_characters"], CONFIG.max_position_embeddings)


def make_adamw(parameters: Iterable[nn.Parameter], learning_rate: float, owner: str) -> torch.optim.Optimizer:
    """Create AdamW, which keeps two moments of each parameter; note the size of all of it after the first step."""
    # Not foreach: its operations over many tensors need all of them on one mesh. With a small eps, steps would follow
    # the sign of gradients that are only rounding.
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0, foreach=False
    )

    def note_size(*_: object) -> None:
        hook.remove()
        folder = FOLDER / "memory"
        folder.mkdir(exist_ok=True)
        size = {"owner": owner, "processes": int(os.environ.get("WORLD_SIZE", "1")), "bytes": count_bytes(optimizer)}
        (folder / f"{owner}-{os.getpid()}.json").write_text(json.dumps(size))

    hook = optimizer.register_step_post_hook(note_size)
    return optimizer


def count_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients and moments in this process."""
    tensors: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = [each for each in optimizer.state[parameter].values() if isinstance(each, torch.Tensor)]
            tensors += [parameter, *moments] + ([] if parameter.grad is None else [parameter.grad])
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(each.numel() * each.element_size() for each in local)


def make_server_optimizer(parameters: Iterable[nn.Parameter], table: ServerLearning) -> torch.optim.Optimizer:
    return make_adamw(parameters, table.learning_rate, "pool")


trainer = ServerTrainer(
    model=make_model,
    data=lambda: load_part("server"),
    evaluation=lambda: load_part("held out"),
    optimizer=make_server_optimizer,
    plan=llama.PLAN,
)
"""The server's trainer; the layout of its ranks is in the job file."""
