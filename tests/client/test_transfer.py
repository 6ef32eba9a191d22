"""Transfers that break and resume, and the model cache."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from fedplat import durable, wire
from fedplat.client_state import ClientState
from fedplat.model import Parameters
from fedplat.wire.v1 import model_pb2
from fedplat_client import Task, TrainResult, TransferError
from fedplat_client._state import model_cache
from fedplat_client._state.model_cache import ModelCache
from fedplat_client._state.two_phase import ClientStateStore, SentReport
from fedplat_client.cancellation import StopSignal
from fedplat_client.task import Control
from support.fake_fleet import FakeFleet
from support.transfers import MakeClient, add_one, models, run, trained_update


def test_a_cut_download_resumes_at_the_byte_where_it_broke(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters, delays: list[float]
) -> None:
    fleet.cut_downloads = [2500, 2500, 4321]
    fleet.assign(model)
    run(make_client())
    assert [request.offset for request in fleet.requests["Download"]] == [0, 2500, 2500, 4321]
    assert sum(fleet.sent_bytes) == model.size_bytes
    assert len(delays) == 3
    digest = fleet.requests["Report"][0].digest
    assert fleet.uploads[digest] == trained_update(base).to_bytes()


def test_a_download_resumes_after_a_restart_of_the_process(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, tmp_path: Path
) -> None:
    fleet.cut_downloads = [2500, 2500]
    fleet.assign(model)
    run(make_client(transfer_attempts=1))
    assert [fail.reason for fail in fleet.requests["Fail"]] == [model_pb2.REASON_TRANSFER_FAILED]
    assert (models(tmp_path) / f"{model.digest}.part").stat().st_size == 2500
    fleet.assign(model)
    run(make_client())
    assert [request.offset for request in fleet.requests["Download"]] == [0, 2500, 2500]
    assert fleet.calls.count("Report") == 1


def test_a_download_without_progress_is_given_up(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, delays: list[float]
) -> None:
    fleet.failures["Download"] = [grpc.StatusCode.UNAVAILABLE] * 5
    fleet.assign(model)
    run(make_client(transfer_attempts=5))
    (fail,) = fleet.requests["Fail"]
    assert fail.reason == model_pb2.REASON_TRANSFER_FAILED
    assert "broke 5 times in a row without progress" in fail.text
    assert "planned for Download" in fail.text
    assert len(delays) == 4


def test_a_refused_download_is_not_tried_again(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.failures["Download"] = [grpc.StatusCode.NOT_FOUND]
    fleet.assign(model)
    run(make_client())
    assert fleet.calls.count("Download") == 1
    assert "NOT_FOUND" in fleet.requests["Fail"][0].text


def test_a_stop_ends_a_download_that_cannot_go_on(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.failures["Download"] = [grpc.StatusCode.UNAVAILABLE] * 1_000_000
    fleet.assign(model)
    fleet.say_stop(model_pb2.REASON_ATTEMPT_ABANDONED)
    run(make_client(transfer_attempts=1_000_000))
    assert not {"Upload", "Report", "Fail"} & set(fleet.calls)


def test_content_with_another_digest_is_deleted_and_downloaded_anew_next_time(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, tmp_path: Path
) -> None:
    good = fleet.models[model.digest]
    fleet.models[model.digest] = bytes(reversed(good))
    fleet.assign(model)
    run(make_client())
    (fail,) = fleet.requests["Fail"]
    assert fail.reason == model_pb2.REASON_TRANSFER_FAILED
    assert hashlib.sha256(bytes(reversed(good))).hexdigest() in fail.text
    assert list(models(tmp_path).iterdir()) == []
    fleet.models[model.digest] = good
    fleet.assign(model)
    run(make_client())
    assert fleet.calls.count("Report") == 1


def test_a_server_that_sends_too_much_is_cut_off(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.models[model.digest] += b"more"
    fleet.assign(model)
    run(make_client())
    assert "more than the" in fleet.requests["Fail"][0].text


@pytest.mark.parametrize("damage", ["flipped", "truncated", "longer part"])
def test_a_damaged_cache_is_noticed_and_mended(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters, tmp_path: Path, damage: str
) -> None:
    fleet.assign(model)
    run(make_client())
    path = models(tmp_path) / f"{model.digest}.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
        path.with_suffix(".part").write_bytes(content + b"more")
    fleet.assign(model)
    run(make_client())
    assert [request.offset for request in fleet.requests["Download"]] == [0, 0]
    assert path.read_bytes() == base.to_bytes()
    assert fleet.calls.count("Report") == 2


@pytest.mark.parametrize("digest", ["../../escape", "", "A" * 64, "a" * 63])
def test_an_invalid_digest_never_becomes_a_file_name(fleet: FakeFleet, make_client: MakeClient, digest: str) -> None:
    fleet.assign(model_pb2.ModelRef(digest=digest, size_bytes=10))
    run(make_client())
    assert "expected 64 lower-case hexadecimal digits" in fleet.requests["Fail"][0].text
    assert "Download" not in fleet.calls


def test_a_model_that_is_not_a_safetensors_file_is_reported(fleet: FakeFleet, make_client: MakeClient) -> None:
    content = b"something else entirely"
    digest = hashlib.sha256(content).hexdigest()
    fleet.models[digest] = content
    fleet.assign(model_pb2.ModelRef(digest=digest, size_bytes=len(content)))
    run(make_client())
    assert fleet.requests["Fail"][0].reason == model_pb2.REASON_TRANSFER_FAILED


@pytest.mark.fault("F14")
@pytest.mark.parametrize("digest_last", [True, False])
def test_a_cut_upload_resumes_at_the_byte_that_the_server_names(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters, digest_last: bool
) -> None:
    fleet.digest_last = digest_last
    fleet.cut_uploads = [10, 5000, 5001]  # the first within the header
    fleet.failures["QueryUpload"] = [grpc.StatusCode.UNAVAILABLE]
    fleet.assign(model)
    run(make_client(transfer_attempts=2))  # fewer than there are breaks: each comes after some progress
    assert [request.offset for request in fleet.requests["Upload"]] == [0, 10, 5000, 5001]
    update = trained_update(base).to_bytes()
    assert sum(fleet.received_bytes) == len(update)
    digest = hashlib.sha256(update).hexdigest()
    assert fleet.requests["Report"][0].digest == digest
    assert fleet.uploads[digest] == update


@pytest.mark.fault("F14", "F15")
def test_an_upload_continues_from_what_an_earlier_process_sent(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters
) -> None:
    """Under its digest, which is the same if the training was repeated."""
    fleet.digest_last = False
    update = trained_update(base).to_bytes()
    digest = hashlib.sha256(update).hexdigest()
    fleet.uploads[digest] += update[:3000]
    fleet.assign(model)
    run(make_client())
    assert [request.offset for request in fleet.requests["Upload"]] == [0, 3000]
    assert fleet.uploads[digest] == update


@pytest.mark.fault("F14")
def test_an_upload_whose_reply_got_lost_is_not_sent_twice(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.lost_replies["Upload"] = 1
    fleet.assign(model)
    run(make_client())
    assert fleet.calls.count("Upload") == 1
    assert fleet.calls.count("Report") == 1


@pytest.mark.fault("F14")
@pytest.mark.parametrize(("digest_last", "resumed"), [(True, 0), (False, 4000)])
def test_an_update_that_a_crashed_server_lost_in_part_is_completed(
    fleet: FakeFleet,
    make_client: MakeClient,
    model: model_pb2.ModelRef,
    base: Parameters,
    digest_last: bool,
    resumed: int,
) -> None:
    fleet.digest_last = digest_last
    fleet.truncate_at_report = 4000
    fleet.assign(model)
    run(make_client())
    update = trained_update(base).to_bytes()
    assert [request.offset for request in fleet.requests["Upload"]] == [0, *([0] if resumed else []), resumed]
    assert fleet.uploads[hashlib.sha256(update).hexdigest()] == update
    assert fleet.calls.count("Report") == 2
    assert "Fail" not in fleet.calls


@pytest.mark.fault("F28")
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_operator_who_goes_back_to_an_old_server_gets_the_update_under_its_digest(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, base: Parameters, is_cut: bool
) -> None:
    """The assignment is from a newer one; if the upload had begun there, the client queries the old one first."""
    fleet.failures["Upload"] = [grpc.StatusCode.UNAVAILABLE] * is_cut
    fleet.digest_last = False
    fleet.assign(model, digest_last=True)
    run(make_client())
    update = trained_update(base).to_bytes()
    digest = hashlib.sha256(update).hexdigest()
    assert [request.digest for request in fleet.requests["Upload"]] == ["", digest]
    assert (fleet.requests["Report"][0].digest, bytes(fleet.uploads[digest])) == (digest, update)


def test_each_training_has_an_upload_of_its_own(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    """Two trainings of one assignment may have other updates; their bytes must not be mixed."""
    for _ in range(2):
        fleet.assign(model, token="same")
    run(make_client(), num_tasks=2)
    names = [request.upload_id for request in fleet.requests["Upload"]]
    assert len(set(names)) == 2
    assert [request.upload_id for request in fleet.requests["Report"]] == names


@pytest.mark.parametrize(
    ("code", "num_uploads"),
    [
        (grpc.StatusCode.UNAVAILABLE, 4),
        (grpc.StatusCode.PERMISSION_DENIED, 1),
        ((grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE"), 1),  # the next upload would find the assignment ended
    ],
)
def test_an_upload_that_cannot_be_done_is_given_up(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef, code: Any, num_uploads: int
) -> None:
    fleet.failures["Upload"] = [code] * 20
    fleet.assign(model)
    run(make_client(transfer_attempts=4))
    (fail,) = fleet.requests["Fail"]
    assert (fail.reason, "planned for Upload" in fail.text) == (model_pb2.REASON_TRANSFER_FAILED, True)
    assert fleet.calls.count("Upload") == num_uploads
    assert "Report" not in fleet.calls


@pytest.mark.fault("F39")
def test_a_busy_server_is_asked_again_in_its_window_which_is_not_a_failure(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.failures["Upload"] = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_UPLOADS")] * 20
    fleet.retry = "3 5"
    fleet.assign(model)
    waits: list[float] = []

    def wait(signal: StopSignal, seconds: float) -> bool:
        waits.append(seconds)
        return signal.is_set()

    run(make_client(transfer_attempts=4, wait=wait))
    assert fleet.calls.count("Upload") == 21
    assert fleet.calls.count("Report") == 1
    assert "Fail" not in fleet.calls
    assert len([seconds for seconds in waits if 3.0 <= seconds <= 5.0]) >= 20


def test_a_stop_ends_an_upload_that_cannot_go_on(
    fleet: FakeFleet, make_client: MakeClient, model: model_pb2.ModelRef
) -> None:
    fleet.failures["Upload"] = [grpc.StatusCode.UNAVAILABLE] * 1_000_000
    fleet.assign(model)
    client = make_client(transfer_attempts=1_000_000)

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        fleet.say_stop(model_pb2.REASON_UPLOAD_TIMEOUT)
        return add_one(task)

    client.run(max_tasks=1)
    assert not {"Report", "Fail"} & set(fleet.calls)


def test_a_model_of_many_chunks_moves_in_messages_below_the_limit(fleet: FakeFleet, make_client: MakeClient) -> None:
    base = Parameters.from_arrays({"weight": np.arange(wire.CHUNK_BYTES, dtype=np.float32)})  # 4 chunks and a header
    fleet.assign(fleet.add_model(base))
    run(make_client())
    digest = fleet.requests["Report"][0].digest
    assert fleet.uploads[digest] == trained_update(base).to_bytes()


def test_waiting_for_a_transfer_ends_with_the_task() -> None:
    control = Control(training_timeout_s=60.0)
    control.expire()
    with pytest.raises(Exception, match="TRAIN_TIMEOUT"):
        control.wait(3600.0)


class TestModelCache:
    def fill(self, cache: ModelCache, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        cache.make_room(len(content), digest)
        with cache.part(digest) as part:
            part.write(content)
            cache.admit(part, digest)
        return digest

    def test_the_least_recently_used_model_goes_first(self, tmp_path: Path) -> None:
        cache = ModelCache(tmp_path / "models", limit_bytes=300)
        first, second, third = (self.fill(cache, bytes([number]) * 100) for number in range(3))
        assert cache.find(first) is not None
        fourth = self.fill(cache, b"x" * 100)
        assert cache.find(second) is None
        assert all(cache.find(digest) for digest in (first, third, fourth))

    def test_leftovers_of_downloads_go_too(self, tmp_path: Path) -> None:
        cache = ModelCache(tmp_path / "models", limit_bytes=150)
        with cache.part("a" * 64) as stale:
            stale.write(b"x" * 100)
        self.fill(cache, b"y" * 100)
        assert not stale.path.exists()

    def test_the_model_in_use_stays_though_it_exceeds_the_limit(self, tmp_path: Path) -> None:
        cache = ModelCache(tmp_path / "models", limit_bytes=10)
        digest = self.fill(cache, b"y" * 100)
        cache.make_room(100, digest)
        assert cache.find(digest) is not None

    def test_another_digest_is_refused(self, tmp_path: Path) -> None:
        cache = ModelCache(tmp_path / "models", limit_bytes=10)
        with cache.part("a" * 64) as part:
            part.write(b"x")
            with pytest.raises(TransferError, match=hashlib.sha256(b"x").hexdigest()):
                cache.admit(part, "a" * 64)
        assert not part.path.exists()

    def test_a_disk_that_is_smaller_than_the_limit_is_enough(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def free_bytes(folder: Path) -> int:
            return 250 - sum(path.stat().st_size for path in folder.iterdir())

        monkeypatch.setattr(model_cache, "free_bytes", free_bytes)
        cache = ModelCache(tmp_path / "models", limit_bytes=2**30)
        first, second, third = (self.fill(cache, bytes([number]) * 100) for number in range(3))
        assert [cache.find(digest) is not None for digest in (first, second, third)] == [False, True, True]

    def test_a_disk_that_is_full_nevertheless_gets_room(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = ModelCache(tmp_path / "models", limit_bytes=2**30)
        first, second = (self.fill(cache, bytes([number]) * 100) for number in range(2))
        used = "c" * 64
        cache.make_room(100, used)
        with cache.part(used) as part:
            write, fails = part._file.write, [errno.ENOSPC, errno.EDQUOT, errno.ENOSPC]  # pyright: ignore[reportPrivateUsage]

            def full(data: bytes) -> int:
                if fails:
                    raise OSError(fails.pop(), "full")
                return write(data)

            monkeypatch.setattr(part, "_file", SimpleNamespace(write=full, close=part._file.close))  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(OSError, match="full"):
                part.write(b"x" * 100)  # there were two files to evict
            assert (cache.find(first), cache.find(second), part.path.exists()) == (None, None, True)
            part.write(b"x" * 100)
        assert part.path.read_bytes() == b"x" * 100

    def test_the_cache_gives_way_to_a_client_state(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = ModelCache(tmp_path / "models", limit_bytes=2**30)
        self.fill(cache, b"x" * 100)
        self.fill(cache, b"y" * 100)
        states = ClientStateStore(tmp_path / "states", 2**30, cache.give_way)
        whole, fails = durable.atomic_write, [errno.ENOSPC]

        def full(path: Path) -> Any:
            if fails:
                raise OSError(fails.pop(), "full")
            return whole(path)

        monkeypatch.setattr(durable, "atomic_write", full)
        state = ClientState()
        state.put("a", Parameters.from_arrays({"w": np.ones(2, np.float32)}))
        assert states.stage("job-1", SentReport("token", "digest"), state)
        assert len(list((tmp_path / "models").iterdir())) == 1


@pytest.mark.parametrize("call", ["open", "utime"])
def test_a_file_that_is_taken_while_it_is_found_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A silo moves the file of a neighbour away while another thread looks for one with the same content."""
    cache, content = ModelCache(tmp_path, 1000), b"a model"
    digest = hashlib.sha256(content).hexdigest()
    path = tmp_path / f"{digest}.safetensors"
    path.write_bytes(content)
    assert cache.find(digest) == path
    owner = Path if call == "open" else os
    original = getattr(owner, call)

    def take_first(*arguments: Any, **options: Any) -> Any:
        path.unlink()
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, take_first)
        assert cache.find(digest) is None
    assert list(tmp_path.iterdir()) == []
