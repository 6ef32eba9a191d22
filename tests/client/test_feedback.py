"""What top-k leaves out is sent later: once, and only if the update that it was left out of was merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedplat import codecs
from fedplat.codecs.container import Format, options_to_text
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2, model_pb2
from fedplat_client import Client, Task, TrainResult
from fedplat_client._state.two_phase import Residuals, SentReport
from support.fake_fleet import FakeFleet

MakeClient = Callable[..., Client]
TOPK = codecs.TopK(fraction=0.1, values="fp32")
ABANDONED = fleet_pb2.ReportResponse(refusal=fleet_pb2.Refusal(reason=model_pb2.REASON_ATTEMPT_ABANDONED))


@pytest.fixture
def base() -> Parameters:
    return Parameters.from_arrays({"weight": np.zeros(100, "f4"), "steps": np.array(7)})


def delta(round_: int) -> np.ndarray:
    return np.random.default_rng(round_).normal(size=100).astype("f4")


def trained(task: Task) -> TrainResult:
    """Returns a change of integers, whose sums are exact."""
    change = {"weight": np.round(1000 * delta(task.round)), "steps": np.array(7)}
    return TrainResult(delta=change, num_examples=1)


class Fleet:
    """One client's work for jobs, round by round."""

    def __init__(self, fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters) -> None:
        self.fleet, self._make, self.model, self.base = fleet, make_client, model, base
        self.options, self.asked = TOPK, list[str]()

    def work(self, round_: int, job_id: str = "job-1", **options: object) -> np.ndarray:
        """Runs one assignment in a new client; returns the part of the vector that it sent."""
        before = len(self.fleet.requests["Report"])
        fields = {"job_id": job_id, "uplink": options_to_text(self.options), "token": f"token of {round_}"}
        self.fleet.assign(self.model, round=round_, **fields)
        client = self._make(**options)
        client.add_trainer("digits", trained)
        client.run(max_tasks=1)
        reports = self.fleet.requests["Report"][before:]
        self.asked = [report.token for report in reports if report.token != f"token of {round_}"]
        (report,) = (report for report in reports if report.token == f"token of {round_}")
        format = Format(self.options, self.base.schema)
        blocks = format.decode(bytes(self.fleet.uploads[report.digest])).to_blocks()
        return np.concatenate([block.copy() for block in blocks])

    def change(self, round_: int) -> np.ndarray:
        return np.round(1000 * delta(round_))


def largest(vector: np.ndarray) -> np.ndarray:
    """The reference: the ten largest entries."""
    kept = np.zeros_like(vector)
    chosen = np.argsort(-np.abs(vector), kind="stable")[:10]
    kept[chosen] = vector[chosen]
    return kept


@pytest.fixture
def job(fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters) -> Fleet:
    return Fleet(fleet, make_client, model, base)


def test_what_is_left_out_of_merged_updates_is_sent_later(job: Fleet) -> None:
    left = np.zeros(100)
    for round_ in range(1, 6):
        sent = job.work(round_)
        np.testing.assert_array_equal(sent, largest(job.change(round_) + left))
        left += job.change(round_) - sent
        assert job.asked == ([f"token of {round_ - 1}"] if round_ > 1 else [])


def test_what_is_left_out_of_an_update_that_was_not_merged_is_forgotten(job: Fleet) -> None:
    """An abandoned attempt is trained again, so keeping its remainder would count it twice."""
    left = job.change(1) - job.work(1)
    second = job.work(2)
    np.testing.assert_array_equal(second, largest(job.change(2) + left))
    job.fleet.receipts = [ABANDONED]  # the answer to the question about the second update
    np.testing.assert_array_equal(job.work(3), largest(job.change(3) + left))
    assert job.asked == ["token of 2"]


@pytest.mark.parametrize("reason", [model_pb2.REASON_UPLOAD_TIMEOUT, model_pb2.REASON_REJECTED_SCHEMA])
def test_late_and_refused_updates_leave_the_residual_as_it_was(job: Fleet, reason: model_pb2.Reason.ValueType) -> None:
    refusal = fleet_pb2.ReportResponse(refusal=fleet_pb2.Refusal(reason=reason, text="no"))
    left = job.change(1) - job.work(1)
    merged = fleet_pb2.ReportResponse(receipt=fleet_pb2.Receipt())
    job.fleet.receipts = [merged, refusal, refusal]  # the end of the first; of the second; of the second again
    job.work(2)
    np.testing.assert_array_equal(job.work(3), largest(job.change(3) + left))


def test_a_server_that_cannot_be_asked_means_not_merged(job: Fleet) -> None:
    job.work(1)
    job.fleet.failures["Report"] = [grpc.StatusCode.UNAVAILABLE] * 3
    np.testing.assert_array_equal(job.work(2), largest(job.change(2)))


def test_another_job_codec_or_schema_begins_anew(job: Fleet) -> None:
    left = job.change(1) - job.work(1)
    np.testing.assert_array_equal(job.work(2, job_id="../another"), largest(job.change(2)))
    assert job.asked == []
    np.testing.assert_array_equal(job.work(3), largest(job.change(3) + left))  # the first job continues
    job.options = codecs.TopK(fraction=0.1, values="fp32", zstd=True)
    np.testing.assert_array_equal(job.work(4), largest(job.change(4)))
    assert job.asked == []


@pytest.mark.parametrize("damage", [b"", b"rubbish", b'{"format":3}\n'])
def test_damaged_residuals_are_no_reason_to_fail(job: Fleet, tmp_path: Path, damage: bytes) -> None:
    job.work(1)
    job.work(2)
    for path in (tmp_path / "data").rglob("residuals/*"):
        path.write_bytes(damage)
    np.testing.assert_array_equal(job.work(3), largest(job.change(3)))


def test_without_room_the_codec_works_without_feedback(job: Fleet) -> None:
    for round_ in (1, 2):
        np.testing.assert_array_equal(job.work(round_, cache_limit_bytes=2000), largest(job.change(round_)))


def test_a_folder_that_cannot_be_used_is_no_reason_to_fail(job: Fleet, tmp_path: Path) -> None:
    job.work(1)
    (folder,) = (tmp_path / "data").rglob("residuals")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in the way")
    np.testing.assert_array_equal(job.work(2), largest(job.change(2)))


def test_residuals_that_are_not_finite_are_forgotten(job: Fleet, tmp_path: Path) -> None:
    job.work(1)
    (folder,) = (tmp_path / "data").rglob("residuals")
    (path,) = folder.iterdir()
    residuals = Residuals(folder, 2**20)
    head = path.read_bytes().partition(b"\n")[0]
    name = head.split(b'"format":"')[1][:64].decode()
    assert residuals.stage("job-1", name, SentReport("token of 1", "d"), np.full(100, np.inf, "f4"))
    np.testing.assert_array_equal(job.work(2), largest(job.change(2)))
    assert list(folder.iterdir()) == []


def test_the_jobs_of_longest_ago_go_first(tmp_path: Path) -> None:
    residuals = Residuals(tmp_path, limit_bytes=23_000)
    vectors = {name: np.full(1000, number, "f4") for number, name in enumerate("abcde")}
    for name, vector in vectors.items():
        assert residuals.stage(name, "f", SentReport(name, name), vector)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 23_000
    found = {name: residuals.load(name, "f", 1000, lambda sent: True) for name in vectors}
    assert [name for name, vector in found.items() if vector is None] == ["a"]
    assert all(np.array_equal(found[name], vectors[name]) for name in "bcde")  # type: ignore[arg-type]
    assert residuals.load("b", "other", 1000, lambda sent: True) is None
    assert residuals.load("c", "f", 999, lambda sent: True) is None
    assert not residuals.stage("huge", "f", SentReport("t", "d"), np.zeros(4000, "f4"))


def test_a_crash_at_any_moment_leaves_one_of_two_residuals(tmp_path: Path) -> None:
    """Until the server answers, both exist; afterwards only the one that matches its answer."""
    one, two = np.full(3, 1, "f4"), np.full(3, 2, "f4")
    for answer in (True, False):
        residuals = Residuals(tmp_path / str(answer), 2**20)
        residuals.stage("job", "f", SentReport("t1", "d1"), one)
        assert residuals.load("job", "f", 3, lambda sent: sent == SentReport("t1", "d1")) is not None
        residuals.stage("job", "f", SentReport("t2", "d2"), two)

        def died(sent: SentReport) -> bool:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            residuals.load("job", "f", 3, died)
        for _ in range(2):  # after its first answer the server is not asked again
            kept = residuals.load("job", "f", 3, lambda sent, answer=answer: answer and sent.token == "t2")
            np.testing.assert_array_equal(kept, two if answer else one)


def test_residuals_are_the_owners_secret(job: Fleet, tmp_path: Path) -> None:
    job.work(1)
    files = list((tmp_path / "data").rglob("residuals/*"))
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
