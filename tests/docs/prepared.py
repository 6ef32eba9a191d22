"""Runs the Python blocks of pages: python prepared.py PAGE PROGRAM ...

The blocks of a page may use names that the reader has, such as a model and a data set. Here a generator for each page
makes them, and checks what the blocks have made of them when they have run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedplat.model import Parameters
from fedplat_client import Client, Task

Names = dict[str, Any]
EXAMPLES = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))


class Net(nn.Module):
    """A model with a part that may be personal."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


def algorithms() -> Generator[Names, Names]:
    names = yield {"make_model": Net}
    initial = names["initial"]()
    assert {*initial} == {"body.weight", "body.bias"}
    assert len(names["initial_head"]().buffer) == 4 * 10 * 257
    task = Task(name="digits", parameters=initial, round=3)
    names["train"](task)
    seen = task.client_state.get("seen")
    assert seen is not None
    assert seen["rounds"] == 3


def extending() -> Generator[Names, Names]:
    from centroids import Centroids  # pyright: ignore[reportMissingImports] -- a file of the page

    client = Client("127.0.0.1:1", population="demo", data_dir="client")
    yield {"client": client, "Centroids": Centroids, "inputs": np.zeros((2, 64)), "labels": np.zeros(2, int)}


def learners() -> Generator[Names, Names]:
    names = yield {"client": 3}
    parameters = Parameters.from_arrays({"weight": np.zeros(1, np.float32)})
    assert names["seed"](Task(name="digits", parameters=parameters)) >= 0


def operations() -> Generator[Names, Names]:
    names = yield {}
    names["provider"].shutdown()


def pool() -> Generator[Names, Names]:
    names = yield {"make_model": make_model, "public_dataset": EXAMPLES, "held_out": EXAMPLES}
    assert names["trainer"]


def privacy() -> Generator[Names, Names]:
    names = yield {"make_model": make_model, "dataset": EXAMPLES}
    assert names["trainer"]


def procedures() -> Generator[Names, Names]:
    names = yield {}
    assert names["result"].sites == 3


def run(page: str, program: Path) -> None:
    os.chdir(program.parent)
    sys.path.insert(0, str(program.parent))
    steps: Generator[Names, Names] = globals()[Path(page).stem]()
    names = next(steps)
    exec(compile(program.read_text(), page, "exec"), names)
    try:
        steps.send(names)
    except StopIteration:
        sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    for page, program in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        run(page, Path(program))
