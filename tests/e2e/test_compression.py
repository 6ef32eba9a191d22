"""Jobs that compress updates, with a real daemon and real clients; and a client whose software knows no codec."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedplat import codecs
from fedplat.admin import AdminClient
from fedplat.cli import submission
from fedplat.codecs.container import Format
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.rounds.invariants.records import StoredAttempt
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, Task, TrainResult
from fedplat_client._work import encoding
from fedplat_client._work.transfer import Content
from fedplat_server.verify import inspection
from fedplat_server.verify.checker import verify
from support import processes
from support.clients import at_work
from support.crash import recompute
from support.jobs import write_job

pytestmark = pytest.mark.slow

NUM_CLIENTS = 3
ROUNDS = 3
CODECS = {
    **{name: record() for name, record in codecs.CODECS.items()},
    "eden": codecs.Eden(bits=1, zstd=True),
    "topk": codecs.TopK(fraction=0.05),
}


def write(name: str, goal: int, rounds: int, more: str) -> str:
    selection = {"goal": goal, "min_fraction": 1.0}
    return write_job(name, population="fleet", trainer="noise", rounds=rounds, selection=selection, more=more)


OLD = """
import sys
from fedplat_client import Client, TrainResult
from fedplat_client._auth import enrollment
enrollment.CODECS = {}  # software from before there were codecs
client = Client.from_ticket(sys.argv[1], data_dir=sys.argv[2], labels={"age": "old"})
client.add_trainer("noise", lambda task: TrainResult(parameters=task.parameters, num_examples=1))
client.run()
"""


def initial() -> Parameters:
    rng = np.random.default_rng(0)
    arrays = {"weight": rng.normal(size=(300, 500)).astype("f4"), "bias": np.ones(7, "f4"), "steps": np.array([1, 5])}
    return Parameters.from_arrays(arrays, "max")


def table(options: codecs.CodecOptions) -> str:
    fields: dict[str, object] = msgspec.to_builtins(options)
    shown = {name: str(value).lower() if isinstance(value, bool) else repr(value) for name, value in fields.items()}
    return "[compression.uplink]\n" + "".join(f"{name} = {value}\n" for name, value in shown.items())


class Fleet:
    """Clients in threads; each moves the weights in its own direction."""

    def __init__(self, ticket: str, folder: Path) -> None:
        self.clients = [Client.from_ticket(ticket, data_dir=folder / str(n)) for n in range(NUM_CLIENTS)]
        for number, client in enumerate(self.clients):
            client.add_trainer("noise", lambda task, number=number: self.train(task, number))

    def train(self, task: Task, number: int) -> TrainResult:
        rng = np.random.default_rng([number, task.round])
        task.parameters["weight"] += rng.normal(size=(300, 500)).astype("f4")
        task.parameters["steps"] += number
        return TrainResult(parameters=task.parameters, num_examples=1 + number)

    def at_work(self) -> contextlib.AbstractContextManager[None]:
        return at_work(self.clients)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files that the clients of this process have sent, by digest: the server keeps none."""
    files: dict[str, bytes] = {}
    encode = encoding.encode

    def noted(*arguments: Any) -> Content:
        content = encode(*arguments)
        files[content.digest] = content.to_bytes()
        return content

    monkeypatch.setattr(encoding, "encode", noted)
    return files


def submit(admin: AdminClient, name: str, goal: int, rounds: int = ROUNDS, more: str = "") -> str:
    text = write(name=name, goal=goal, rounds=rounds, more=more)
    return submission.submit(admin, submission.Submission(text, parse_job(text), initial())).job_id


def completed(admin: AdminClient, job: str) -> None:
    for _ in admin.watch_job(job):
        pass
    assert admin.show_job(job).status == admin_pb2.JOB_STATUS_COMPLETED


def test_a_job_with_each_codec(tmp_path: Path, sent: dict[str, bytes], subtests: pytest.Subtests) -> None:
    folder = tmp_path / "server"
    with processes.server(folder) as server, server.admin() as admin:
        with Fleet(server.ticket("fleet", NUM_CLIENTS), tmp_path).at_work():
            jobs = {name: submit(admin, name, NUM_CLIENTS, more=table(options)) for name, options in CODECS.items()}
            for job in jobs.values():
                completed(admin, job)
        for name, job in jobs.items():
            admin.export_model(job, None, tmp_path / name)
        received = {name: sum(attempt.update_bytes for attempt in admin.list_rounds(job)) for name, job in jobs.items()}
    assert asyncio.run(verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings == []
    plain = NUM_CLIENTS * ROUNDS * len(initial().to_bytes())
    for name, job in jobs.items():
        with subtests.test(name):
            expected, num_bytes = asyncio.run(recomputed(folder, job, CODECS[name], sent))
            assert Parameters.open(tmp_path / name) == expected
            assert expected["steps"].tolist() == [1 + 2 * ROUNDS, 5 + 2 * ROUNDS]
            assert received[name] == num_bytes < (1.1 if name == "none" else 0.55) * plain


async def recomputed(
    folder: Path, job: str, options: codecs.CodecOptions, sent: dict[str, bytes]
) -> tuple[Parameters, int]:
    """The last model by NumPy alone: FedAvg of what the files decode to, in the order that the database has.

    And the size of the files.
    """
    model, num_bytes = initial(), 0
    async with inspection.snapshot(f"sqlite:///{folder / 'fedplat.sqlite'}") as connection:
        units = [unit async for unit in inspection.units(connection)]
    attempts = [unit for unit in units if isinstance(unit, StoredAttempt) and unit.job.job_id == job]
    for attempt in attempts:
        total, weights = np.zeros(model.schema.num_floating, np.float32), 0.0
        steps: list[Any] = []
        for row in recompute.merged(attempt):
            num_bytes += len(sent[row.digest])
            values = Format(options, model.schema).decode(sent[row.digest])
            total += np.concatenate([block.copy() for block in values.to_blocks()]) * np.float32(row.weight)
            weights += row.weight
            steps += [part for run in model.schema.segments if run.dtype == "I64" for part in values.read_carried(run)]
        model = model.plus((total / np.float32(weights)).astype(np.float32))
        model["steps"] = np.max(steps, axis=0)
    return model, num_bytes


def test_a_client_without_the_codec_is_not_selected(tmp_path: Path) -> None:
    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        ticket = server.ticket("fleet", NUM_CLIENTS + 1)
        command = [sys.executable, "-c", OLD, ticket, str(tmp_path / "old")]
        with processes.processes([command], tmp_path / "old.log"), Fleet(ticket, tmp_path).at_work():
            processes.until(lambda: admin.status().num_waiting == NUM_CLIENTS + 1, "all clients")
            (old,) = (client.client_id for client in admin.list_clients("fleet") if client.labels)
            first = submit(admin, "first", NUM_CLIENTS, more=table(codecs.Bf16()))
            completed(admin, first)
            assert old not in {event.client_id for event in admin.watch_job(first)}
            second = submit(admin, "second", NUM_CLIENTS + 1, rounds=1)
            completed(admin, second)
            assert old in {event.client_id for event in admin.watch_job(second)}
