"""What the clients of the tests do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Sequence

import numpy as np

from fedplat_client import Client, Task, TrainResult


def add_one(task: Task) -> TrainResult:
    task.parameters["weight"] += np.float32(1)
    return TrainResult(parameters=task.parameters, num_examples=3, metrics={"loss": 0.5})


@contextlib.contextmanager
def at_work(clients: Sequence[Client]) -> Generator[None]:
    """Each client works in a thread of its own; at the end all are stopped and waited for."""
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for client in clients:
            client.stop()
        for thread in threads:
            thread.join()
