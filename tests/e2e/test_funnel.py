"""The funnel of every attempt is that of the database, also after stragglers, a killed client and a killed server."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from fedplat.admin import AdminClient
from fedplat.cli import submission, watch
from fedplat.job import parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_client import Client, Task, TrainResult
from support import processes
from support.clients import at_work
from support.jobs import write_job

pytestmark = pytest.mark.slow

ROUNDS = 5
JOB = write_job(
    "funnel",
    population="few",
    trainer="add",
    rounds=ROUNDS,
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


@pytest.mark.fault("F1", "F2")
@pytest.mark.timeout(300)
def test_the_funnel_is_that_of_the_database(tmp_path: Path) -> None:
    """In round 1 a client is killed and one fails, round 2 has a straggler, and in round 3 the server is killed."""
    in_round_3, go_on, pause, failed = (threading.Event() for _ in range(4))

    def train(task: Task) -> TrainResult:
        if task.round == 3:
            in_round_3.set()
            assert go_on.wait(processes.PATIENCE_S)
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

    with processes.server(tmp_path / "server") as server, server.admin() as admin:
        ticket, began = server.ticket("few", 6), tmp_path / "began"
        clients = [Client.from_ticket(ticket, data_dir=tmp_path / str(n)) for n in range(4)]
        for client, trainer in zip(clients, (train, train, fail_once, be_late_once), strict=True):
            client.add_trainer("add", trainer)
        arguments = [sys.executable, "-c", VICTIM, ticket, str(tmp_path / "victim"), str(began)]
        with processes.processes([arguments], tmp_path / "victim.log") as (victim,), at_work(clients):
            try:
                model = Parameters.from_arrays({"weight": np.zeros(40_000, np.float32)})  # too large to be inline
                job = submission.submit(admin, submission.Submission(JOB, parse_job(JOB), model))
                processes.until(began.exists, "the work of the client that is killed")
                victim.send_signal(signal.SIGKILL)
                assert in_round_3.wait(processes.PATIENCE_S)
                server.kill()
                go_on.set()
                server.start()
                ended = watch.follow(admin, job.job_id, watch.View(lambda event: None, lambda text: None))
            finally:
                go_on.set()
        assert ended.status == admin_pb2.JOB_STATUS_COMPLETED
        with contextlib.closing(sqlite3.connect(tmp_path / "server" / "fedplat.sqlite")) as connection:
            # The time of a last download may still be on its way to the database.
            processes.until(lambda: _funnels(admin, job.job_id) == _stored(connection, job.job_id), "equal funnels")
            _check(connection, job.job_id, list(admin.iter_rounds(job.job_id, all_attempts=True)))


def _stored(connection: sqlite3.Connection, job_id: str) -> list[tuple[int, ...]]:
    return list(connection.execute(OUTCOMES, (job_id,)))


def _funnels(admin: AdminClient, job_id: str) -> list[tuple[int, ...]]:
    return [
        (
            *(each.round, each.attempt, each.checked_in, each.eligible, each.assigned),
            *(each.downloaded, each.trained, each.merged),
        )
        for each in admin.iter_rounds(job_id, all_attempts=True)
    ]


def _check(connection: sqlite3.Connection, job_id: str, attempts: list[admin_pb2.Round]) -> None:
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
