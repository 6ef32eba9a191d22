"""A client with elastic averaging, as a process that kills itself: `python elastic_client.py TICKET FOLDER POINT`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat_client import Client
from fedplat_client._auth.authenticator import Connection
from fedplat_client._state.two_phase import ClientStateStore
from fedplat_client.trainers.torch import TorchTrainer

INPUTS = (np.random.default_rng(9).normal(size=(12, 3))).astype("f4")
POINTS = {"its model is stored": (ClientStateStore, "stage", 3), "it has reported": (Connection, "report", 5)}
"""After which call of what the process dies. Each training but the first reports the last update again, to ask."""


def make_trainer() -> TorchTrainer:
    """Its gradients are constant, so that each training moves the sum of all models by a known amount."""
    return TorchTrainer(
        model=lambda: nn.Linear(3, 1, bias=False),
        loss=lambda outputs, targets: outputs.mean(),
        data=TensorDataset(torch.from_numpy(INPUTS), torch.zeros((12, 1))),
        seed=1,
    )


def die_after(owner: type[Any], name: str, number: int) -> None:
    """Let the process kill itself after a call of a method, when that has done its work."""
    method, calls = getattr(owner, name), list[None]()

    def called(*args: Any, **options: Any) -> Any:
        result = method(*args, **options)
        calls.append(None)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, called)


if __name__ == "__main__":
    ticket, folder, point = sys.argv[1:]
    die_after(*POINTS[point])
    client = Client.from_ticket(ticket, data_dir=Path(folder))
    client.add_trainer("elastic", make_trainer())
    client.run()
