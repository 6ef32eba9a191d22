"""Blobs are there as a whole or not at all."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedplat_server.errors import BlobError, BlobFullError, ServerError
from fedplat_server.storage.blob_folder import StoredDigests
from fedplat_server.storage.blobs import Blob, BlobStore

DATA = b"model" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def everything(blobs: BlobStore) -> list[str]:
    return sorted(path.name for path in blobs.folder.rglob("*") if path.is_file())


def test_bytes_that_come_in_parts_are_stored(blobs: BlobStore) -> None:
    parts = [DATA[:7], bytearray(DATA[7:100]), memoryview(DATA)[100:2000], np.frombuffer(DATA[2000:], np.uint8).data]
    assert blobs.put_chunks(parts) == Blob(DIGEST, len(DATA))
    assert blobs.path(DIGEST) == blobs.folder / DIGEST[:2] / DIGEST[2:4] / DIGEST
    assert blobs.path(DIGEST).read_bytes() == DATA
    assert (blobs.exists(DIGEST), blobs.size(DIGEST)) == (True, len(DATA))
    assert everything(blobs) == [DIGEST]


def test_sizes_are_bytes_not_elements(blobs: BlobStore) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert blobs.put_chunks([array.data]) == Blob(hashlib.sha256(array.tobytes()).hexdigest(), 24)


def test_nothing_is_a_blob_too(blobs: BlobStore) -> None:
    blob = blobs.put_chunks([])
    assert blob == Blob(hashlib.sha256().hexdigest(), 0)
    assert blobs.exists(blob.digest)


def test_a_file_is_copied(blobs: BlobStore, tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.write_bytes(DATA * 500)
    blob = blobs.put_file(source)
    assert blob == Blob(hashlib.sha256(DATA * 500).hexdigest(), 2_500_000)
    assert source.exists()
    with pytest.raises(BlobError, match="nowhere"):
        blobs.put_file(tmp_path / "nowhere")


def test_a_file_is_adopted(blobs: BlobStore, tmp_path: Path) -> None:
    source = tmp_path / "update"
    source.write_bytes(DATA)
    assert blobs.adopt(source, DIGEST) == Blob(DIGEST, len(DATA))
    assert not source.exists()
    assert blobs.path(DIGEST).read_bytes() == DATA
    with pytest.raises(BlobError, match="adopting"):
        blobs.adopt(source, DIGEST)


def test_storing_again_changes_nothing(blobs: BlobStore) -> None:
    assert blobs.put_chunks([DATA]) == blobs.put_chunks([DATA])
    assert everything(blobs) == [DIGEST]


def test_deleting(blobs: BlobStore) -> None:
    blobs.put_chunks([DATA])
    blobs.delete(DIGEST)
    blobs.delete(DIGEST)
    assert not blobs.exists(DIGEST)
    with pytest.raises(BlobError, match=DIGEST):
        blobs.size(DIGEST)


@pytest.mark.parametrize(
    "digest", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "/" * 64, DIGEST + "\n", "a/" * 32, "é" * 64]
)
def test_only_digests_name_blobs(blobs: BlobStore, digest: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(DATA)
    for operation in (blobs.path, blobs.exists, blobs.size, blobs.delete, functools.partial(blobs.adopt, source)):
        with pytest.raises(BlobError, match="not a digest"):
            operation(digest)
    assert source.exists()


def test_another_start_finds_what_was_stored(blobs: BlobStore) -> None:
    blobs.put_chunks([DATA])
    again = BlobStore(blobs.folder)
    assert again.all_digests() == {DIGEST}


def test_orphans_and_temporary_files_are_removed(blobs: BlobStore) -> None:
    digests = [blobs.put_chunks([bytes([number])]).digest for number in range(10)]
    with blobs.temporary() as left:
        pass  # a process that is killed within the block leaves the file
    left.write_bytes(b"half a mod")
    for name in ("README", "0123.tmp"):
        (blobs.folder / name).write_text("not ours")
    assert blobs.remove_orphans(StoredDigests(frozenset(digests[:3]) | {DIGEST}, frozenset(digests))) == (7, 0)
    assert everything(blobs) == sorted(["README", "0123.tmp", *digests[:3]])
    assert blobs.all_digests() == frozenset(digests[:3])


@pytest.mark.parametrize("way", ["put", "adopt", "adopt_file"])
def test_the_bytes_of_a_blob_are_durable_before_its_name(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        steps.append(f"sync {path.relative_to(blobs.folder)}" if path.is_dir() else "sync the file")

    def note_rename(source: Path, target: Path) -> None:
        replace(source, target)
        steps.append("rename")

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    first, second = f"sync {DIGEST[:2]}", f"sync {DIGEST[:2]}/{DIGEST[2:4]}"
    for expected in (["sync the file", "sync .", first, "rename", second], ["sync the file", "rename", second]):
        source = blobs.folder / "draft.tmp"
        source.write_bytes(DATA)
        steps.clear()
        if way == "put":
            blobs.put_file(source)
        elif way == "adopt":
            blobs.adopt(source, DIGEST)
        else:
            blobs.adopt_file(source)
        assert steps == expected


# --- failures: nothing is left, and the next try works ---------------------------------------------------------


class Failing:
    """Stands in for a function of `os`; its `nth` call fails."""

    def __init__(self, name: str, code: int, nth: int = 1) -> None:
        self._function = getattr(os, name)
        self._code = code
        self.calls_left = nth

    def __call__(self, *arguments: object) -> object:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise OSError(self._code, os.strerror(self._code))
        return self._function(*arguments)


STEPS = [
    ("write", errno.EIO, 1),
    ("fsync", errno.EIO, 1),  # the file
    ("fsync", errno.EIO, 2),  # the folder of the folders aa
    ("fsync", errno.EIO, 3),  # the folder aa
    ("replace", errno.EIO, 1),
    ("fsync", errno.EIO, 4),  # the folder aa/bb
    ("write", errno.ENOSPC, 1),
    ("fsync", errno.ENOSPC, 1),
    ("write", errno.EDQUOT, 1),
]


@pytest.mark.parametrize(("function", "code", "nth"), STEPS)
@pytest.mark.fault("F7", "F8")
def test_a_step_that_fails_leaves_nothing(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch, function: str, code: int, nth: int
) -> None:
    failing = Failing(function, code, nth)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing)
        with pytest.raises(BlobError) as caught:
            blobs.put_chunks([DATA])
    assert failing.calls_left == 0, "the failing call was not the last of its kind"
    assert isinstance(caught.value, BlobFullError) == (code in {errno.ENOSPC, errno.EDQUOT})
    assert isinstance(caught.value.__cause__, OSError)
    assert everything(blobs) == []
    assert blobs.put_chunks([DATA]).digest == DIGEST
    assert everything(blobs) == [DIGEST]


@pytest.mark.fault("F8")
def test_folders_are_synced_until_that_succeeded_once(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is there may not be durable: the sync that failed is made good by the next blob."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Failing("fsync", errno.EIO, 2))
        with pytest.raises(BlobError):
            blobs.put_chunks([DATA])
    counting = Failing("fsync", errno.EIO, 1000)
    monkeypatch.setattr(os, "fsync", counting)
    blobs.put_chunks([DATA])
    assert counting.calls_left == 1000 - 4
    blobs.put_chunks([DATA])
    assert counting.calls_left == 1000 - 4 - 2


def test_folders_of_the_first_level_are_made_together_after_a_few(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = Failing("fsync", errno.EIO, 1000)
    monkeypatch.setattr(os, "fsync", counting)
    contents = [str(number).encode() for number in range(12)]
    assert len({hashlib.sha256(content).hexdigest()[:2] for content in contents}) == len(contents)
    used = list[int]()
    for content in contents:
        before = counting.calls_left
        blobs.put_chunks([content])
        used.append(before - counting.calls_left)
    assert used == [4, 4, 4, *([3] * 9)]
    assert len([path for path in blobs.folder.iterdir() if path.is_dir()]) == 256


# --- copies of rows --------------------------------------------------------------------------------------------


def test_a_small_blob_of_an_attempt_is_a_copy_that_is_not_synced(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, synced = blobs.recorder(len(DATA)), list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)
    assert view.put_chunks([DATA[:7], DATA[7:]]) == Blob(DIGEST, len(DATA))
    assert (view.contents, view.made, everything(blobs)) == ({DIGEST: DATA}, [DIGEST], [DIGEST])
    assert synced == []
    assert blobs.exists(DIGEST)
    assert len(synced) == 4, "a job may begin with it, although it never becomes a row"
    assert blobs.exists(DIGEST)
    assert len(synced) == 4
    larger = view.put_chunks([DATA, b"more"])
    assert (view.contents.keys(), view.made) == ({DIGEST}, [DIGEST, larger.digest])
    assert blobs.path(larger.digest).read_bytes() == DATA + b"more"
    assert len(synced) >= 7


def test_a_copy_never_replaces_a_blob(blobs: BlobStore) -> None:
    blobs.put_chunks([DATA])
    inode = blobs.path(DIGEST).stat().st_ino
    blobs.recorder(len(DATA)).put_chunks([DATA])
    assert blobs.path(DIGEST).stat().st_ino == inode
    blobs.path(DIGEST).write_bytes(b"damaged")
    blobs.recorder(len(DATA)).put_chunks([DATA])
    assert blobs.path(DIGEST).read_bytes() == DATA


def test_a_sweep_keeps_a_copy_until_it_is_settled(blobs: BlobStore) -> None:
    view = blobs.recorder(len(DATA))
    view.put_chunks([DATA])
    with blobs.sweep() as sweep:
        assert sweep.remove([DIGEST]) == 0
    blobs.settle(view.made)
    with blobs.sweep() as sweep:
        assert sweep.remove([DIGEST]) == len(DATA)
    assert not blobs.exists(DIGEST)


def test_a_copy_that_the_disk_cannot_give_back_is_lost(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = blobs.put_chunks([DATA]).digest

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hashlib, "file_digest", fail)
    assert blobs.find_lost([digest]) == [digest]


def test_what_is_lost_is_restored_from_rows_that_are_intact(blobs: BlobStore) -> None:
    other = blobs.put_chunks([b"other"]).digest
    blobs.path(other).write_bytes(b"torn")
    assert blobs.find_lost([DIGEST, other]) == sorted([DIGEST, other])
    blobs.restore({DIGEST: DATA, other: b"not its bytes"})
    assert blobs.find_lost([DIGEST, other]) == [other]
    with blobs.sweep() as sweep:
        assert sweep.remove([DIGEST]) == len(DATA), "it is settled"


def test_writes_that_write_less_go_on(blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))  # type: ignore[misc]
    assert blobs.put_chunks([DATA]).digest == DIGEST
    assert blobs.path(DIGEST).read_bytes() == DATA


def test_a_source_that_fails_leaves_nothing(blobs: BlobStore) -> None:
    def parts() -> Iterator[bytes]:
        yield DATA
        raise ServerError("the stream broke")

    with pytest.raises(ServerError, match="the stream broke"):
        blobs.put_chunks(parts())
    assert everything(blobs) == []


def test_a_failed_adoption_leaves_the_file_where_it_was(
    blobs: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "update"
    source.write_bytes(DATA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Failing("fsync", errno.EIO, 1))
        with pytest.raises(BlobError):
            blobs.adopt(source, DIGEST)
    assert source.exists()
    assert everything(blobs) == []


FULL = """
import resource, sys
from pathlib import Path
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.errors import BlobError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
blobs = BlobStore(Path(sys.argv[1]))
try:
    blobs.put_chunks([b"x" * 70_000, b"y" * 70_000])
except BlobError as exc:
    print(exc)
print(blobs.put_chunks([b"x" * 70_000]).size_bytes)
"""


@pytest.mark.fault("F7")
def test_a_real_limit_leaves_nothing(blobs: BlobStore) -> None:
    command = [sys.executable, "-c", FULL, str(blobs.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["writing a blob failed: [Errno 27] File too large", "70000"]
    assert len(everything(blobs)) == 1


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BlobError, match="making the folder"):
        BlobStore(tmp_path / "file" / "blobs")
