"""What travels between a real daemon and real clients: compressed updates, deltas of versions, and to whom."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedplat import codecs
from fedplat.codecs.container import Format
from fedplat.model import Parameters
from fedplat.rounds.invariants.records import StoredAttempt, StoredJob
from fedplat_client import Client, Task, TrainResult
from fedplat_client._work import training, transfer
from fedplat_client._work.content import Content
from support import deployment, processes
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


def write(name: str, goal: int, rounds: int = ROUNDS, uplink: codecs.CodecOptions | None = None) -> str:
    selection = {"goal": goal, "min_fraction": 1.0}
    compression: dict[str, Any] = {} if uplink is None else {"uplink": msgspec.to_builtins(uplink)}
    return write_job(
        name, population="noise", trainer="noise", rounds=rounds, selection=selection, compression=compression
    )


def noise(task: Task, number: int) -> TrainResult:
    rng = np.random.default_rng([number, task.round])
    task.parameters["weight"] += rng.normal(size=(300, 500)).astype("f4")
    task.parameters["steps"] += number
    return TrainResult(parameters=task.parameters, num_examples=1 + number)


def noisy(clients: list[Client]) -> contextlib.AbstractContextManager[None]:
    """Clients at work; each moves the weights in its own direction."""
    for number, client in enumerate(clients):
        client.add_trainer("noise", lambda task, number=number: noise(task, number))
    return at_work(clients)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files that the clients of this process have sent, by digest: the server keeps none."""
    files: dict[str, bytes] = {}
    encode = training.encode

    def noted(*arguments: Any) -> Content:
        content = encode(*arguments)
        files[content.digest] = content.to_bytes()
        return content

    monkeypatch.setattr(training, "encode", noted)
    return files


def test_a_job_with_each_codec(
    server: processes.Server, tmp_path: Path, sent: dict[str, bytes], subtests: pytest.Subtests
) -> None:
    with server.admin() as admin, noisy(deployment.clients_of(server, "noise", tmp_path, NUM_CLIENTS)):
        jobs = {
            name: deployment.submit(admin, write(name, NUM_CLIENTS, uplink=options), initial())
            for name, options in CODECS.items()
        }
        for job in jobs.values():
            deployment.completed(admin, job)
        models = {name: deployment.exported(admin, job, tmp_path) for name, job in jobs.items()}
        received = {name: sum(attempt.update_bytes for attempt in admin.list_rounds(job)) for name, job in jobs.items()}
    attempts = [unit for unit in deployment.units(server) if isinstance(unit, StoredAttempt)]
    plain = NUM_CLIENTS * ROUNDS * len(initial().to_bytes())
    for name, job in jobs.items():
        with subtests.test(name):
            mine = [attempt for attempt in attempts if attempt.job.job_id == job]
            expected, num_bytes = recomputed(mine, CODECS[name], sent)
            assert models[name] == expected
            assert expected["steps"].tolist() == [1 + 2 * ROUNDS, 5 + 2 * ROUNDS]
            assert received[name] == num_bytes < (1.1 if name == "none" else 0.55) * plain


def recomputed(
    attempts: list[StoredAttempt], options: codecs.CodecOptions, sent: dict[str, bytes]
) -> tuple[Parameters, int]:
    """The last model by NumPy alone: FedAvg of what the files decode to, in the order that the database has.

    And the size of the files.
    """
    model, num_bytes = initial(), 0
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


def test_a_client_without_the_codec_is_not_selected(server: processes.Server, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OLD, server.ticket("noise"), str(tmp_path / "old")]
    new = deployment.clients_of(server, "noise", tmp_path, NUM_CLIENTS)
    with server.admin() as admin, processes.processes([command], tmp_path / "old.log"), noisy(new):
        processes.until(lambda: deployment.num_waiting(admin, "noise") == NUM_CLIENTS + 1, "all clients")
        (old,) = (client.client_id for client in admin.list_clients("noise") if client.labels)
        first = deployment.submit(admin, write("first", NUM_CLIENTS, uplink=codecs.Bf16()), initial())
        assert old not in {event.client_id for event in deployment.completed(admin, first)}
        second = deployment.submit(admin, write("second", NUM_CLIENTS + 1, rounds=1), initial())
        assert old in {event.client_id for event in deployment.completed(admin, second)}


DOWNLINK = write_job(
    "downlink",
    population="downlink",
    trainer="noise",
    rounds=4,
    selection={"goal": 2, "min_fraction": 1.0},
    retry={"base_s": 0.05},
    compression={"uplink": {"codec": "eden", "bits": 4}, "downlink": {"codec": "eden", "bits": 4}},
)
LEAVES_IN = 3
"""The round in which one client leaves, and a fresh one takes its place."""


class Member:
    """A client in a thread; `hold`: it trains in that round until the server stops it."""

    def __init__(self, name: str, client: Client, hold: int = 0) -> None:
        self.reached = threading.Event()
        self._hold = hold
        self.client = client
        self.client.add_trainer("noise", self._train)
        self._thread = threading.Thread(target=self.client.run, name=name)

    def _train(self, task: Task) -> TrainResult:
        if task.round == self._hold and not self.reached.is_set():
            self.reached.set()
            while True:
                task.progress(0.5)  # ends the task, once the attempt is over
                threading.Event().wait(0.02)
        rng = np.random.default_rng(task.round)
        task.parameters["weight"] += rng.normal(size=(300, 500)).astype("f4")
        task.parameters["steps"] += 1
        return TrainResult(parameters=task.parameters, num_examples=1)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.client.stop()
        if self._thread.ident is not None:
            self._thread.join()


@contextlib.contextmanager
def stopped_at_the_end(*members: Member) -> Generator[None]:
    try:
        yield
    finally:
        for member in members:
            member.stop()


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, int]]]:
    """What each client of this process has downloaded: digests and bytes."""
    noted: dict[str, list[tuple[str, int]]] = defaultdict(list)
    download = transfer.download

    def counted(connection: Any, source: transfer.Source, part: Any, *others: Any) -> None:
        before = part.size
        download(connection, source, part, *others)
        noted[threading.current_thread().name].append((source.digest, part.size - before))

    monkeypatch.setattr(transfer, "download", counted)
    return noted


def test_who_holds_a_version_downloads_the_delta_to_the_next(
    server: processes.Server, tmp_path: Path, downloads: dict[str, list[tuple[str, int]]]
) -> None:
    clients = deployment.clients_of(server, "downlink", tmp_path, 3)
    stays, leaves, joins = (
        Member(name, client, hold)
        for name, client, hold in zip(("stays", "leaves", "joins"), clients, (LEAVES_IN, LEAVES_IN, 0), strict=True)
    )
    with server.admin() as admin:
        with stopped_at_the_end(stays, leaves, joins):
            stays.start()
            leaves.start()
            job = deployment.submit(admin, DOWNLINK, initial())
            processes.until(lambda: stays.reached.is_set() and leaves.reached.is_set(), "round 3")
            joins.start()
            processes.until(lambda: deployment.num_waiting(admin, "downlink") == 1, "the client that joins")
            leaves.stop()
            deployment.completed(admin, job)
        shown = [version.delta_size_bytes for version in admin.list_versions(job)]
        model = deployment.exported(admin, job, tmp_path)
    (stored,) = [unit for unit in deployment.units(server) if isinstance(unit, StoredJob) and unit.row.job_id == job]
    versions = stored.versions
    whole = [(version.digest, version.size_bytes) for version in versions]
    delta = [(version.delta_digest, version.delta_size_bytes) for version in versions]
    assert shown == [size_bytes for _, size_bytes in delta]
    assert downloads == {
        "stays": [whole[0], delta[1], delta[2], delta[3]],
        "leaves": [whole[0], delta[1], delta[2]],
        "joins": [whole[2], delta[3]],
    }
    assert all(7 * small < large for (_, small), (_, large) in zip(delta[1:], whole[1:], strict=True))
    assert model["steps"].tolist() == [5, 9]
