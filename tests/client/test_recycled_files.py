"""A job's next version overwrites the file of one that it no longer needs, and nothing that anyone else has."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fedplat.model import Parameters
from fedplat_client import Task, TrainResult
from fedplat_client._state import model_cache
from fedplat_client._state.model_cache import ModelCache, PartialDownload
from support.fake_fleet import FakeFleet
from support.transfers import MakeClient, add_one, models, run

PIECE = 1000


def version(number: int, size: int = 1000) -> Parameters:
    return Parameters.from_arrays({"weight": np.full(size, number, np.float32)})


def digest_of(model: Parameters) -> str:
    return hashlib.sha256(model.to_bytes()).hexdigest()


def receive(part: PartialDownload, content: bytes) -> None:
    for start in range(part.size, len(content), PIECE):
        part.write(content[start : start + PIECE])


def use(cache: ModelCache, model: Parameters, job: str = "job", *needed: str) -> Parameters:
    """Download and map a version as a job does; its map exists as long as what is returned."""
    content, digest = model.to_bytes(), digest_of(model)
    path = cache.find(digest)
    if path is None:
        cache.recycle(job, digest, len(content), *needed)
        with cache.part(digest) as part:
            receive(part, content)
            path = cache.admit(part, digest)
    opened = Parameters.open(path)
    cache.note_use(job, digest, opened)
    return opened


def files(folder: Path) -> dict[str, int]:
    """The inode of each model, by its digest; all have the content of their name."""
    found = {path.stem: path for path in folder.glob("*.safetensors")}
    assert {stem: hashlib.sha256(path.read_bytes()).hexdigest() for stem, path in found.items()} == {
        stem: stem for stem in found
    }
    return {stem: path.stat().st_ino for stem, path in found.items()}


@pytest.fixture
def cache(tmp_path: Path) -> ModelCache:
    return ModelCache(tmp_path / "models", 2**30)


def test_each_version_of_a_job_is_written_into_one_file(
    fleet: FakeFleet, make_client: MakeClient, tmp_path: Path
) -> None:
    inodes: list[dict[str, int]] = []
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        inodes.append(files(models(tmp_path)))
        return add_one(task)

    used = [fleet.add_model(version(number)) for number in range(3)]
    for model in [used[0], used[0], *used[1:]]:
        fleet.assign(model)
    client.run(max_tasks=4)
    assert [list(found) for found in inodes] == [[model.digest] for model in [used[0], *used]]
    assert len({number for found in inodes for number in found.values()}) == 1
    assert [request.digest for request in fleet.requests["Download"]] == [model.digest for model in used]


def test_a_trainer_may_keep_the_arrays_of_a_task(fleet: FakeFleet, make_client: MakeClient, tmp_path: Path) -> None:
    kept: list[npt.NDArray[Any]] = []
    client = make_client()

    @client.trainer("digits")
    def train(task: Task) -> TrainResult:
        if task.round == 1:
            kept.append(task.parameters["weight"][5:].reshape(5, -1)[1:])  # a view of a view, not changed
        return TrainResult(parameters=task.parameters.copy(), num_examples=1)

    used = [version(number) for number in range(3)]
    for number, model in enumerate(used, 1):
        fleet.assign(fleet.add_model(model), round=number)
    client.run(max_tasks=3)
    (view,) = kept
    assert np.all(view == 0)
    assert set(files(models(tmp_path))) == {digest_of(used[0]), digest_of(used[2])}


@pytest.mark.parametrize("num_received", range(5))
def test_a_download_into_a_recycled_file_continues_in_another_process(
    tmp_path: Path, cache: ModelCache, monkeypatch: pytest.MonkeyPatch, num_received: int
) -> None:
    """The process dies after the bytes and before the mark, whose number is then that of the piece before."""
    old, new = version(1), version(2)
    content = new.to_bytes()
    del [use(cache, old)][:]
    cache.recycle("job", digest_of(new), len(content))
    writes = iter(range(num_received))
    write_mark = model_cache._write_mark  # pyright: ignore[reportPrivateUsage]

    def write(*arguments: Any) -> None:
        if next(writes, None) is None:
            raise KeyboardInterrupt
        write_mark(*arguments)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(model_cache, "_write_mark", write)
        with cache.part(digest_of(new)) as part:
            receive(part, content)
    later = ModelCache(tmp_path / "models", 2**30)
    with later.part(digest_of(new)) as part:
        assert part.size == min(num_received * PIECE, len(content))
        receive(part, content)
        later.admit(part, digest_of(new))
    assert list(files(tmp_path / "models")) == [digest_of(new)]


def test_a_cut_download_into_a_recycled_file_resumes_after_a_restart(
    fleet: FakeFleet, make_client: MakeClient, tmp_path: Path
) -> None:
    old, new = (fleet.add_model(version(number)) for number in range(2))
    fleet.cut_downloads = [old.size_bytes, 2500, 2500]
    fleet.assign(old)
    fleet.assign(new)
    run(make_client(transfer_attempts=1), num_tasks=2)
    assert [path.stem for path in models(tmp_path).iterdir()] == [new.digest]
    fleet.assign(new)
    run(make_client())
    assert [request.offset for request in fleet.requests["Download"]] == [0, 0, 2500, 2500]
    assert list(files(models(tmp_path))) == [new.digest]


@pytest.mark.parametrize("step", ["replace", "truncate"])
def test_a_death_around_the_new_name_costs_a_download_at_most(
    tmp_path: Path, cache: ModelCache, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    old, new = version(1), version(2)
    del [use(cache, old)][:]

    def die(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(*((Path, "replace") if step == "replace" else (PartialDownload, "finish")), die)
        use(cache, new)
    later = ModelCache(tmp_path / "models", 2**30)
    assert later.find(digest_of(old)) is None
    assert use(later, new) == new
    assert list(files(tmp_path / "models")) == [digest_of(new)]


def test_other_bytes_are_found_in_a_recycled_file(cache: ModelCache, tmp_path: Path) -> None:
    """Such as those of a power failure, which has kept the mark and not the bytes."""
    old, new = version(1), version(2)
    content = new.to_bytes()
    del [use(cache, old)][:]
    cache.recycle("job", digest_of(new), len(content))
    with cache.part(digest_of(new)) as part:
        receive(part, content)
        model_cache._write_mark(part._file.fileno(), len(content), len(content))  # pyright: ignore[reportPrivateUsage]
        os.pwrite(part._file.fileno(), b"old", 500)  # pyright: ignore[reportPrivateUsage]
    with cache.part(digest_of(new)) as part, pytest.raises(model_cache.TransferError, match="expected"):
        cache.admit(part, digest_of(new))
    assert list((tmp_path / "models").iterdir()) == []


class TestNotRecycled:
    """The file of a version that is not free; the new version then gets a file of its own."""

    @pytest.fixture(autouse=True)
    def _both_stay(self, tmp_path: Path, cache: ModelCache) -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
        yield
        assert set(files(tmp_path / "models")) == {digest_of(version(1)), digest_of(version(2))}

    def test_of_another_job(self, cache: ModelCache) -> None:
        use(cache, version(1), "first")
        use(cache, version(1), "second")
        use(cache, version(2), "first")

    def test_that_is_needed(self, cache: ModelCache) -> None:
        """A delta is added to its base, and the version before that is overwritten."""
        use(cache, version(0))
        use(cache, version(1), "job", digest_of(version(0)))
        use(cache, version(2), "job", digest_of(version(1)))

    def test_that_is_mapped(self, cache: ModelCache) -> None:
        opened = use(cache, version(1))
        use(cache, version(1))  # its second map is gone
        assert use(cache, version(2)) == version(2)
        assert opened == version(1)

    def test_that_a_child_may_have_mapped(self, cache: ModelCache) -> None:
        opened = use(cache, version(1))
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        del opened
        use(cache, version(2))

    def test_that_has_two_names(self, cache: ModelCache, tmp_path: Path) -> None:
        use(cache, version(1))
        path = tmp_path / "models" / f"{digest_of(version(1))}.safetensors"
        (tmp_path / "backup").hardlink_to(path)
        use(cache, version(2))

    def test_of_an_earlier_process(self, cache: ModelCache, tmp_path: Path) -> None:
        use(cache, version(1))
        use(ModelCache(tmp_path / "models", 2**30), version(2))


def test_a_version_of_another_size_gets_a_file_of_its_own(cache: ModelCache, tmp_path: Path) -> None:
    use(cache, version(1))
    use(cache, version(2, size=999))
    assert len(files(tmp_path / "models")) == 2


def test_the_mark_of_a_file_is_not_believed_beyond_its_end(cache: ModelCache, tmp_path: Path) -> None:
    content = b"x" * 20
    path = tmp_path / "models" / f"{'a' * 64}.part"
    for number, expected in ((20, 20), (21, 36)):
        path.write_bytes(content + model_cache._MARK.pack(b"received", number))  # pyright: ignore[reportPrivateUsage]
        with cache.part("a" * 64) as part:
            assert part.size == expected
