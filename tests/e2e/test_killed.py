"""One server dies of SIGKILL three times, and each time it is started again by the same line: nothing is lost.

Each scenario is a job of its own population, which another property of a restart belongs to.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from fedplat.admin import AdminClient
from fedplat.cli import watch
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Task, TrainResult
from support import deployment, killed_adapters, killed_uploads, otlp, processes
from support.clients import add_one, at_work
from support.jobs import write_job
from support.watching import Watching, watched

pytestmark = pytest.mark.slow
HELD_S = 500.0
"""A bound for the trainings that wait until the server has been killed, some of them to the end of the test."""


class Place(NamedTuple):
    """The server that is killed, an operator, and the receiver of its spans."""

    server: processes.Server
    admin: AdminClient
    receiver: otlp.Receiver


class Held(NamedTuple):
    """A scenario whose clients train: they end their tasks after `go_on`, and then `check` waits for the result."""

    go_on: Callable[[], None]
    check: Callable[[], None]


def vector(size: int = 4) -> Parameters:
    return Parameters.from_arrays({"weight": np.zeros(size, np.float32)})


def followed(admin: AdminClient, job: str, on_event: Callable[[admin_pb2.JobEvent], None] = lambda _: None) -> None:
    ended = watch.follow(admin, job, watch.View(on_event, lambda _: None))
    assert ended.status == admin_pb2.JOB_STATUS_COMPLETED


ROUNDS = 6
SURVIVOR = write_job(
    "survivor",
    population="survivors",
    trainer="add",
    rounds=ROUNDS,
    selection={"goal": 3, "min_fraction": 1.0},
    deadlines={"heartbeat_s": 0.2},
    retry={"base_s": 0.1},
    aggregation={"rule": "fedavgm", "momentum": 0.5},
)


@contextlib.contextmanager
def survivor(place: Place, folder: Path) -> Generator[Held]:
    """FedAvgM, so that the optimizer's state must survive too: every client adds 1, hence v = 1, 1.5, 1.75, ..."""
    in_training, go_on = threading.Event(), threading.Event()
    admin = place.admin

    def train(task: Task) -> TrainResult:
        if task.round == 3:
            in_training.set()
            assert go_on.wait(HELD_S)
        task.parameters["weight"][:] += 1.0
        return TrainResult(parameters=task.parameters, num_examples=5)

    def check() -> None:
        sequences: list[int] = []
        followed(admin, job, lambda event: sequences.append(event.sequence))
        assert sequences == sorted(set(sequences))
        attempts = admin.list_rounds(job, all_attempts=True)
        assert [(attempt.round, attempt.attempt) for attempt in attempts] == [(n + 1, 1) for n in range(ROUNDS)]
        assert [version.model.version for version in admin.list_versions(job)] == list(range(ROUNDS + 1))
        velocity, expected = 0.0, 0.0
        for _ in range(ROUNDS):
            velocity = 0.5 * velocity + 1.0
            expected += velocity
        np.testing.assert_allclose(deployment.exported(admin, job, folder)["weight"], expected, rtol=1e-6)

    clients = deployment.clients_of(place.server, "survivors", folder, 3)
    for client in clients:
        client.add_trainer("add", train)
    with at_work(clients), released(go_on):
        job = deployment.submit(admin, SURVIVOR, vector(16))
        assert in_training.wait(processes.PATIENCE_S)
        yield Held(go_on.set, check)


@contextlib.contextmanager
def released(go_on: threading.Event) -> Generator[None]:
    """Clients that wait end with the test, however that ends."""
    try:
        yield
    finally:
        go_on.set()


@contextlib.contextmanager
def exact(place: Place, folder: Path) -> Generator[Held]:
    with killed_adapters.exact(place.server, place.admin, folder) as (go_on, check):
        yield Held(go_on, check)


SEPARATED = write_job(
    "separated",
    population="separated",
    trainer="note",
    rounds=7,
    selection={
        "goal": 2,
        "min_fraction": 1.0,
        "min_separation": 2,
        "sampling": {"policy": "oort", "pacer_s": 10},
    },
    deadlines={"heartbeat_s": 0.2},
    retry={"base_s": 0.1},
)


@contextlib.contextmanager
def separated(place: Place, folder: Path) -> Generator[Held]:
    """Six clients for seven rounds of two: each has to take part in every third round, or the job starves."""
    in_training, go_on = threading.Event(), threading.Event()
    rounds: dict[int, set[int]] = {number: set() for number in range(6)}

    def train(task: Task, number: int) -> TrainResult:
        rounds[number].add(task.round)
        if task.round == 3:
            in_training.set()
            assert go_on.wait(HELD_S)
        return TrainResult(parameters=task.parameters, num_examples=5, metrics={"loss": 1.0 + number})

    def check() -> None:
        followed(place.admin, job)
        groups = [{number for number, took in rounds.items() if round_ in took} for round_ in range(1, 8)]
        assert all(len(group) == 2 for group in groups)
        assert groups[0] | groups[1] | groups[2] == set(range(6))
        assert groups[3:6] == groups[:3]
        assert groups[6] == groups[0]

    clients = deployment.clients_of(place.server, "separated", folder, 6)
    for number, client in enumerate(clients):
        client.add_trainer("note", lambda task, number=number: train(task, number))
    with at_work(clients), released(go_on):
        job = deployment.submit(place.admin, SEPARATED, vector())
        assert in_training.wait(processes.PATIENCE_S)
        yield Held(go_on.set, check)


FUNNEL = write_job(
    "funnel",
    population="funnel",
    trainer="add",
    rounds=5,
    selection={"goal": 3, "over_selection": 1.6, "min_fraction": 0.3, "close": "deadline"},
    deadlines={"heartbeat_s": 0.2, "training_s": 6.0, "selection_s": 2.0},
    retry={"base_s": 0.1},
)
VICTIM = """
import sys, threading
from fedplat_client import Client
client = Client.from_ticket(sys.argv[1], data_dir=sys.argv[2])
def train(task):
    open(sys.argv[3], "w").close()
    threading.Event().wait()
client.add_trainer("add", train)
client.run()
"""
OUTCOMES = """
SELECT a.round, a.number, a.num_checked_in, a.num_eligible,
  (SELECT count(*) FROM assignments s WHERE s.job_id = a.job_id AND s.round = a.round AND s.number = a.number),
  (SELECT count(*) FROM assignments s WHERE s.job_id = a.job_id AND s.round = a.round AND s.number = a.number
     AND (s.downloaded_unix_s IS NOT NULL OR s.uploading_unix_s IS NOT NULL OR s.took_s IS NOT NULL
          OR s.state = 'REJECTED')),
  (SELECT count(*) FROM assignments s WHERE s.job_id = a.job_id AND s.round = a.round AND s.number = a.number
     AND (s.uploading_unix_s IS NOT NULL OR s.took_s IS NOT NULL OR s.state = 'REJECTED')),
  (SELECT count(*) FROM assignments s WHERE s.job_id = a.job_id AND s.round = a.round AND s.number = a.number
     AND s.state = 'MERGED')
FROM attempts a WHERE a.job_id = ? ORDER BY a.round, a.number
"""
STATES = "SELECT state, count(*) FROM assignments WHERE job_id = ? AND round = ? AND number = ? GROUP BY state"


@contextlib.contextmanager
def funnel(place: Place, folder: Path) -> Generator[Held]:
    """The funnel of every attempt is that of the database.

    In round 1 a client is killed and one fails, round 2 has a straggler, and in round 3 the server is killed.
    """
    in_round_3, go_on, pause, failed = (threading.Event() for _ in range(4))
    admin = place.admin

    def train(task: Task) -> TrainResult:
        if task.round == 3:
            in_round_3.set()
            assert go_on.wait(HELD_S)
        task.parameters["weight"][:] += 1.0
        return TrainResult(parameters=task.parameters, num_examples=5)

    def fail_once(task: Task) -> TrainResult:
        if not failed.is_set():  # in its first round, since it may miss the one after the server was killed
            failed.set()
            raise ValueError("no data today")
        return train(task)

    def be_late_once(task: Task) -> TrainResult:
        while task.round == 2:
            task.progress(0.1)  # raises `Cancelled` when the deadline has passed
            pause.wait(0.05)
        return train(task)

    def check() -> None:
        followed(admin, job)
        with contextlib.closing(sqlite3.connect(place.server.folder / "fedplat.sqlite")) as connection:
            # The time of a last download may still be on its way to the database.
            processes.until(
                lambda: funnels_of(admin, job) == list(connection.execute(OUTCOMES, (job,))), "equal funnels"
            )
            check_funnels(connection, job, list(admin.iter_rounds(job, all_attempts=True)))

    began = folder / "began"
    clients = deployment.clients_of(place.server, "funnel", folder, 4)
    for client, trainer in zip(clients, (train, train, fail_once, be_late_once), strict=True):
        client.add_trainer("add", trainer)
    command = [sys.executable, "-c", VICTIM, place.server.ticket("funnel"), str(folder / "victim"), str(began)]
    with processes.processes([command], folder / "victim.log") as (victim,), at_work(clients), released(go_on):
        job = deployment.submit(admin, FUNNEL, vector(40_000))  # too large to be inline
        processes.until(began.exists, "the work of the client that is killed")
        victim.send_signal(signal.SIGKILL)
        assert in_round_3.wait(processes.PATIENCE_S)
        yield Held(go_on.set, check)


def funnels_of(admin: AdminClient, job_id: str) -> list[tuple[int, ...]]:
    return [
        (
            *(each.round, each.attempt, each.checked_in, each.eligible, each.assigned),
            *(each.downloaded, each.trained, each.merged),
        )
        for each in admin.iter_rounds(job_id, all_attempts=True)
    ]


def check_funnels(connection: sqlite3.Connection, job_id: str, attempts: list[admin_pb2.Round]) -> None:
    seen: set[str] = set()
    for each in attempts:
        states = dict(connection.execute(STATES, (job_id, each.round, each.attempt)))
        seen |= states.keys()
        named = {"late": "LATE", "failed": "FAILED", "rejected": "REJECTED", "surplus": "SURPLUS", "dropped": "DROPPED"}
        counts = {name: getattr(each, name) for name in named}
        assert counts == {name: states.get(state, 0) for name, state in named.items()}
        assert each.assigned == each.busy + each.reported + sum(counts.values())
        assert each.checked_in >= each.eligible >= each.assigned >= each.downloaded >= each.trained >= each.merged
    assert seen >= {"MERGED", "FAILED", "LATE"}


@contextlib.contextmanager
def uploads(place: Place, folder: Path) -> Generator[Held]:
    """The server is killed in the upload of one client, and the other client in its own upload."""
    with killed_uploads.held(place.server, place.admin, folder) as (go_on, check):
        yield Held(go_on, check)


NUM_TRACED = 20
TRACED = write_job(
    "traced",
    population="traced",
    trainer="add",
    rounds=2,
    selection={"goal": NUM_TRACED, "min_fraction": 1.0},
    deadlines={"heartbeat_s": 0.5},
)


def trace_id_of(job: str, round_: int) -> bytes:
    return hashlib.sha256(f"{job}/{round_}/1".encode()).digest()[:16]


@contextlib.contextmanager
def traced(place: Place, folder: Path) -> Generator[Held]:
    """Round 1 ends while the receiver is away; in round 2, while all clients train, the server is killed."""
    program = Path(otlp.__file__).with_name("traced_clients.py")
    command = [sys.executable, str(program), place.receiver.address, str(folder), str(NUM_TRACED)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdin is not None
        assert clients.stdout is not None
        write = clients.stdin

        def tell(line: str) -> None:
            write.write(f"{line}\n")
            write.flush()

        def check() -> None:
            followed(place.admin, job)
            write.close()  # ends the clients, which send their last spans
            assert clients.wait(processes.PATIENCE_S) == 0
            for round_ in (1, 2):
                processes.until(lambda n=round_: is_whole(place.receiver, trace_id_of(job, n)), "every span")
            assert f'"trace_id": "{trace_id_of(job, 2).hex()}"' in place.server.log_text()

        try:
            tell(place.server.ticket("traced", NUM_TRACED))
            job = deployment.submit(place.admin, TRACED, vector())
            assert [clients.stdout.readline() for _ in range(NUM_TRACED)] == ["training\n"] * NUM_TRACED
            assert place.receiver.refused.wait(processes.PATIENCE_S)
            yield Held(lambda: tell("go on"), check)
        finally:
            write.close()


def is_whole(receiver: otlp.Receiver, trace_id: bytes) -> bool:
    """Whether the trace of a round has arrived, with a training of each client below its assignment."""
    own = {span.span_id: span for span in receiver.spans(trace_id)}
    found = Counter(span.name for span in own.values())
    expected = {"attempt TRAIN": 1, "select": 1, "collect": 1, "commit": 1, "assignment": NUM_TRACED}
    theirs = receiver.spans(trace_id, "hospital")
    trained = [own[span.parent_span_id] for span in theirs if span.name == "train" and span.parent_span_id in own]
    assert all(found[name] <= expected.get(name, 0) for name in found)
    return (
        found == expected
        and Counter(span.name for span in trained) == {"assignment": NUM_TRACED}
        and len({span.span_id for span in trained}) == NUM_TRACED
    )


LONG = write_job(
    "long",
    population="long",
    trainer="add",
    selection={"goal": 2},
    deadlines={"training_s": 3600, "heartbeat_s": 0.2},
)


class Trainings:
    """Two trainings that report their progress, and wait."""

    def __init__(self, place: Place) -> None:
        self.tasks: list[Task] = []
        self.go_on = threading.Event()
        self.job = ""
        self._place = place
        self._fractions = iter((0.25, 0.75))
        self._lock = threading.Lock()

    def train(self, task: Task) -> TrainResult:
        with self._lock:
            task.progress(next(self._fractions))
            self.tasks.append(task)
        assert self.go_on.wait(HELD_S)
        return TrainResult(parameters=task.parameters, num_examples=1)

    def have_left(self, least_s: float, most_s: float) -> bool:
        return len(self.tasks) == 2 and all(least_s < task.remaining_s <= most_s for task in self.tasks)

    def is_known(self) -> bool:
        """Whether both clients' heartbeats have arrived since the server was started."""
        progress = self._place.admin.show_job(self.job).current.progress
        if progress.num_known < 2:
            return False
        assert (progress.num_training, progress.median, progress.minimum) == (2, 0.5, 0.25)
        fractions = {client.client_id: client.progress for client in self._place.admin.list_clients("long")}
        assert sorted(fractions.values()) == [0.25, 0.75]
        assert fractions[progress.slowest_client_id] == 0.25
        return True

    def move_deadlines(self, seconds: float) -> None:
        """Kill the server, move deadlines as a change of its wall clock would, and start it again."""
        server = self._place.server
        server.kill()
        with contextlib.closing(sqlite3.connect(server.folder / "fedplat.sqlite")) as connection, connection:
            moved = "UPDATE assignments SET deadline_unix_s = deadline_unix_s + ? WHERE job_id = ?"
            assert connection.execute(moved, (seconds, self.job)).rowcount == 2
        server.start()


@contextlib.contextmanager
def long_trainings(place: Place, folder: Path) -> Generator[Trainings]:
    trainings = Trainings(place)
    clients = deployment.clients_of(place.server, "long", folder, 2)
    for client in clients:
        client.add_trainer("add", trainings.train)
    with at_work(clients), released(trainings.go_on):
        trainings.job = deployment.submit(place.admin, LONG, vector(16))
        processes.until(trainings.is_known, "heartbeats with the progress")
        yield trainings
        trainings.go_on.set()
        deployment.completed(place.admin, trainings.job)


@contextlib.contextmanager
def again(place: Place, folder: Path) -> Generator[Held]:
    """A client works for a job before the server is killed and for one after it."""
    file = write_job("again", population="again", trainer="add", retry={"base_s": 0.1})

    def check() -> None:
        deployment.completed(place.admin, deployment.submit(place.admin, file, vector()))
        assert len(place.admin.list_clients("again")) == 1

    clients = deployment.clients_of(place.server, "again", folder, 1, first_backoff_s=0.1, max_backoff_s=0.5)
    clients[0].add_trainer("add", add_one)
    with at_work(clients):
        deployment.completed(place.admin, deployment.submit(place.admin, file, vector()))
        yield Held(lambda: None, check)


@pytest.mark.fault("F1", "F2", "F18", "F21")
@pytest.mark.timeout(600)
def test_a_server_that_is_killed_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(otlp.receiving())
        receiver.away.set()
        options = ("--traces", receiver.address, "--json-log", "--webhook-network", "127.0.0.0/8")
        server = stack.enter_context(processes.server(tmp_path / "server", *options))
        place = Place(server, stack.enter_context(server.admin()), receiver)
        watching = stack.enter_context(watched(server))
        trainings = stack.enter_context(long_trainings(place, tmp_path / "long"))
        # The funnel is the last one, since its rounds have deadlines of seconds.
        scenarios = {
            "survivor": survivor,
            "separated": separated,
            "exact": exact,
            "traced": traced,
            "again": again,
            "uploads": uploads,
            "funnel": funnel,
        }
        held: dict[str, Held] = {}
        for name, scenario in scenarios.items():
            (tmp_path / name).mkdir()
            held[name] = stack.enter_context(scenario(place, tmp_path / name))
        watching.change()
        server.kill()
        receiver.away.clear()
        for each in held.values():
            each.go_on()
        server.start()
        for name, each in held.items():
            with subtests.test(name):
                each.check()
        assert "session" not in caplog.text  # the server has forgotten them all
        watching.check()
        with subtests.test("deadlines"):
            check_deadlines(trainings, watching)
        watching.end()
    deployment.check(server)


def check_deadlines(trainings: Trainings, watching: Watching) -> None:
    """Restarts change the deadlines of clients, and lose their progress for a heartbeat."""
    processes.until(trainings.is_known, "heartbeats with the progress, after a restart")
    assert trainings.have_left(1200.0, 3600.0)
    watching.change()
    trainings.move_deadlines(-2400.0)
    processes.until(lambda: trainings.have_left(0.0, 1200.0), "an earlier deadline")
    processes.until(trainings.is_known, "heartbeats with the progress, after another one")
    watching.check()
    watching.change()
    trainings.move_deadlines(7200.0)
    processes.until(lambda: trainings.have_left(1200.0, 3600.0), "a later deadline, within training_s")
    watching.check()
