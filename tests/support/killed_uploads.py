"""A job whose server is killed in the upload of one client, and whose other client is killed in its own upload.

The second client trains again after its restart, with another result: bytes of both must not be mixed.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from fedplat.admin import AdminClient
from fedplat.model import Parameters
from fedplat_client._work.content import StreamedUpdate
from support import deployment, processes
from support.clients import add_one, at_work
from support.jobs import write_job

UPLOADED = write_job("uploaded", population="uploaded", trainer="add", rounds=1, selection={"goal": 2})
KILLED_IN_ITS_UPLOAD = """
import os, signal, sys
from fedplat_client import Client, TrainResult
from fedplat_client._work.content import StreamedUpdate
split, step = StreamedUpdate.split, float(sys.argv[3])
def die(update, start, clock):
    for number, part in enumerate(split(update, start, clock)):
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        yield part
if step == 7:
    StreamedUpdate.split = die
client = Client.from_ticket(sys.argv[1], data_dir=sys.argv[2])
def train(task):
    task.parameters["weight"][:] += step
    return TrainResult(parameters=task.parameters, num_examples=5)
client.add_trainer("add", train)
client.run(max_tasks=1)
"""


@contextlib.contextmanager
def held(
    server: processes.Server, admin: AdminClient, folder: Path
) -> Generator[tuple[Callable[[], None], Callable[[], None]]]:
    """Within the block, one client waits in its upload; yields what lets it continue, and what waits for the result."""
    in_upload, go_on, split = threading.Event(), threading.Event(), StreamedUpdate.split

    def hold(update: StreamedUpdate, start: int, clock: Callable[[], float]) -> Iterator[memoryview]:
        for number, part in enumerate(split(update, start, clock)):
            if number == 2:
                in_upload.set()
                assert go_on.wait(500.0)
            yield part

    def check() -> None:
        deployment.completed(admin, job)
        attempts = admin.list_rounds(job, all_attempts=True)
        assert [(each.round, each.attempt, each.merged) for each in attempts] == [(1, 1, 2)]
        np.testing.assert_array_equal(deployment.exported(admin, job, folder)["weight"], 1.0)

    clients = deployment.clients_of(server, "uploaded", folder, 1)
    clients[0].add_trainer("add", add_one)
    command = [sys.executable, "-c", KILLED_IN_ITS_UPLOAD, server.ticket("uploaded"), str(folder / "killed")]
    model = Parameters.from_arrays({"weight": np.zeros(500_000, np.float32)})
    with mock.patch.object(StreamedUpdate, "split", hold), at_work(clients), contextlib.ExitStack() as stack:
        stack.callback(go_on.set)  # the client ends with the test, however that ends
        job = deployment.submit(admin, UPLOADED, model)
        for step, status in (("7", -signal.SIGKILL), ("1", 0)):
            with processes.processes([[*command, step]], folder / f"killed-{step}.log") as (client,):
                assert client.wait(processes.PATIENCE_S) == status
        assert in_upload.wait(processes.PATIENCE_S)
        yield go_on.set, check
