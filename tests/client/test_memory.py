"""What trainers remember counts once, and only if the update that it belongs to was merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedplat import codecs
from fedplat.client_state import ClientState
from fedplat.codecs.container import options_to_text
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client, EvaluateResult, Task, TrainResult
from fedplat_client._state.two_phase import ClientStateStore, SentReport
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
ABANDONED = fleet_pb2.ReportResponse(refusal=fleet_pb2.Refusal(reason=model_pb2.REASON_ATTEMPT_ABANDONED))
MERGED = fleet_pb2.ReportResponse(receipt=fleet_pb2.Receipt())


def note(count: int) -> Parameters:
    return Parameters.from_arrays({"control/a/b": np.array(count), "x": np.full(300, count, "f4")})


def seen(task: Task) -> int:
    known = task.client_state.get("count")
    return 0 if known is None else int(known["control/a/b"])


class Job:
    """A trainer that counts its trainings, in clients that are started anew for each assignment."""

    def __init__(self, fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef) -> None:
        self.fleet, self._make, self._model = fleet, make_client, model
        self.counts = list[int]()

    def _train(self, task: Task) -> TrainResult:
        self.counts.append(seen(task))
        task.client_state.put("count", note(seen(task) + 1))
        return TrainResult(parameters=task.parameters, num_examples=1)

    def _evaluate(self, task: Task) -> EvaluateResult:
        self.counts.append(seen(task))
        task.client_state.put("count", note(99))  # of no effect
        return EvaluateResult(num_examples=1, metrics={"loss": 0.0})

    def work(self, *, evaluate: bool = False, options: dict[str, int] | None = None, **fields: object) -> int:
        """One assignment; what the trainer or evaluator remembered when it began."""
        task = fleet_pb2.TASK_EVALUATE if evaluate else fleet_pb2.TASK_TRAIN
        self.fleet.assign(self._model, task=task, **fields)
        client = self._make(**(options or {}))
        client.add_trainer("digits", self._train)
        client.add_evaluator("digits", self._evaluate)
        client.run(max_tasks=1)
        return self.counts[-1]


@pytest.fixture
def job(fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef) -> Job:
    return Job(fleet, make_client, model)


def test_a_client_that_is_started_again_remembers(job: Job) -> None:
    assert [job.work() for _ in range(4)] == [0, 1, 2, 3]


def test_what_came_of_an_update_that_was_not_merged_is_forgotten(job: Job) -> None:
    assert [job.work(), job.work()] == [0, 1]
    job.fleet.receipts = [ABANDONED]  # what became of the second
    assert [job.work(), job.work()] == [1, 2]


@pytest.mark.parametrize("reason", [model_pb2.REASON_UPLOAD_TIMEOUT, model_pb2.REASON_REJECTED_SCHEMA])
def test_late_and_refused_updates_are_forgotten(job: Job, reason: model_pb2.Reason.ValueType) -> None:
    refusal = fleet_pb2.ReportResponse(refusal=fleet_pb2.Refusal(reason=reason, text="no"))
    job.work()
    job.fleet.receipts = [MERGED, refusal, refusal]  # what became of the first; the second; the same again
    assert [job.work(), job.work()] == [1, 1]


def test_what_is_valid_waits_until_the_server_has_told(job: Job) -> None:
    """The answer to the report was lost, though the server has merged the update."""
    job.work()
    job.fleet.failures["Report"] = [grpc.StatusCode.UNAVAILABLE] * 3
    job.work()
    (failure,) = job.fleet.requests["Fail"]
    assert failure.reason == model_pb2.REASON_TRANSFER_FAILED
    assert "the server did not report whether it has merged the last update" in failure.text
    assert job.counts == [0]  # nothing was trained
    assert [job.work(), job.work()] == [1, 2]


def test_an_evaluation_looks_and_settles_nothing(job: Job) -> None:
    """It may come while the attempt is open yet."""
    job.work()
    job.fleet.receipts = [MERGED]
    assert job.work(evaluate=True) == 1
    job.fleet.receipts = [ABANDONED]
    assert [job.work(), job.work()] == [0, 1]
    assert job.work(evaluate=True) == 2


def test_another_job_has_a_memory_of_its_own(job: Job) -> None:
    assert [job.work(), job.work(job_id="../another"), job.work(), job.work(job_id="../another")] == [0, 0, 1, 1]


def test_the_server_is_asked_once_for_memory_and_residual(job: Job) -> None:
    uplink = options_to_text(codecs.TopK(fraction=0.1))
    job.work(uplink=uplink, token="first")
    job.work(uplink=uplink, token="second")
    assert [report.token for report in job.fleet.requests["Report"]] == ["first", "first", "second"]


def test_without_room_the_assignment_fails(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.work(options={"cache_limit_bytes": 1000})
    (failure,) = job.fleet.requests["Fail"]
    assert failure.reason == model_pb2.REASON_TRAINER_ERROR
    assert "the client state of the job cannot be stored: it exceeds cache_limit_bytes" in failure.text
    assert not job.fleet.requests["Report"]


def test_a_folder_that_cannot_be_used_fails_only_those_who_remember(
    job: Job, make_client: MakeClient, model: model_pb2.ModelRef, tmp_path: Path
) -> None:
    job.work()
    (folder,) = (tmp_path / "data").rglob("memories")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in the way")
    job.work()
    assert [failure.reason for failure in job.fleet.requests["Fail"]] == [model_pb2.REASON_TRAINER_ERROR]
    job.fleet.assign(model)
    client = make_client()
    client.add_trainer("digits", lambda task: TrainResult(parameters=task.parameters, num_examples=1))
    client.run(max_tasks=1)
    assert len(job.fleet.requests["Fail"]) == 1


@pytest.mark.parametrize("damage", [b"", b"rubbish", b'{"format":3}\n'])
def test_damaged_memories_begin_anew(job: Job, tmp_path: Path, damage: bytes) -> None:
    job.work()
    for path in (tmp_path / "data").rglob("memories/*"):
        path.write_bytes(damage)
    assert job.work() == 0


def test_memories_are_the_owners_secret(job: Job, tmp_path: Path) -> None:
    job.work()
    (folder,) = (tmp_path / "data").rglob("memories")
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())] == [0o700, 0o600]


def test_the_jobs_of_longest_ago_go_first_and_what_is_unchanged_is_not_written(tmp_path: Path) -> None:
    memories = ClientStateStore(tmp_path, limit_bytes=9_000)
    for name in "abcd":
        memory = ClientState()
        memory.put("count", note(1))
        assert memories.stage(name, SentReport(name, name), memory)
    kept = {name: memories.open(name, lambda sent: True, training=True) for name in "abcd"}
    assert [name for name, memory in kept.items() if memory.get("count") is None] == ["a"]
    before = sorted(path.name for path in tmp_path.iterdir())
    assert memories.stage("d", SentReport("later", "later"), kept["d"])
    assert sorted(path.name for path in tmp_path.iterdir()) == before
