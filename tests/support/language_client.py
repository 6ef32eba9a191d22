"""A silo that fine-tunes a tiny language model; as a script `language_client.py TICKET DATA_DIR MARK`.

The script touches the file MARK in the third round of a job, and waits until it is killed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedplat_client import Client, Task
from fedplat_client.trainers.huggingface import HuggingFaceTrainer
from support import language

ARGUMENTS = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "lr_scheduler_type": "cosine"}


def make_silo(
    ticket: str,
    data_dir: Path,
    number: int,
    mark: Path | None = None,
    model: Callable[[], Any] = language.make_adapted,
) -> Client:
    """A silo with 24 examples, or 8 more for each further number."""

    def data(task: Task) -> language.Text:
        if mark is not None and task.round == 3:
            mark.touch()
            threading.Event().wait()
        return make_data(number)

    client = Client.from_ticket(ticket, data_dir=data_dir)
    client.add_trainer("chat", make_trainer(data, model))
    return client


def make_data(number: int) -> language.Text:
    """The examples of a silo."""
    return language.Text(24 + 8 * number, seed=number)


def make_trainer(
    data: Callable[[Task], language.Text], model: Callable[[], Any] = language.make_adapted
) -> HuggingFaceTrainer:
    return HuggingFaceTrainer(model=model, data=data, arguments=ARGUMENTS)


if __name__ == "__main__":
    make_silo(sys.argv[1], Path(sys.argv[2]), 0, Path(sys.argv[3])).run()
