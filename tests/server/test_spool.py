"""Uploads that outlive the process, uploads that never touch the disk, and syncs that fail."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from fedplat_server.errors import BlobError, BlobFullError, SpoolError, UploadError
from fedplat_server.upload_files import MemoryFile, SpoolFile
from fedplat_server.uploads import UploadKey, UploadStore

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
KEY = UploadKey("job", 1, 2, "client")


class Disk:
    """Counts syncs of files and of folders; `fails` holds the kinds that fail, and how."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[str] = []
        self.fails: dict[str, int] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        self.synced.append(kind)
        if kind in self.fails:
            raise OSError(self.fails[kind], os.strerror(self.fails[kind]))
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def uploads(tmp_path: Path) -> UploadStore:
    return UploadStore(tmp_path / "uploads")


def fill(uploads: UploadStore, key: UploadKey = KEY, data: bytes = DATA) -> Path:
    digest = hashlib.sha256(data).hexdigest()
    upload = uploads.open(key, digest, len(data), uploads.received(key, digest))
    upload.write(data)
    upload.close()
    path = uploads.complete(key, digest)
    assert path is not None
    return path


# --- made durable --------------------------------------------------------------------------------------------


def test_an_update_and_its_folder_are_synced_once(uploads: UploadStore, disk: Disk) -> None:
    fill(uploads)
    assert disk.synced == ["folder"]  # the folder of the folders
    uploads.persist(KEY, DIGEST)
    assert disk.synced == ["folder", "file", "folder"]
    uploads.persist(KEY, DIGEST)
    assert len(disk.synced) == 3


def test_what_is_not_there_cannot_be_made_durable(uploads: UploadStore) -> None:
    with pytest.raises(UploadError, match="not there any more"):
        uploads.persist(KEY, DIGEST)


@pytest.mark.fault("F8")
@pytest.mark.parametrize(("code", "error"), [(errno.EIO, BlobError), (errno.ENOSPC, BlobFullError)])
def test_a_sync_that_failed_means_not_written(
    uploads: UploadStore, disk: Disk, code: int, error: type[BlobError]
) -> None:
    fill(uploads)
    disk.fails["file"] = code
    with pytest.raises(error):
        uploads.persist(KEY, DIGEST)
    assert uploads.complete(KEY, DIGEST) is None
    assert uploads.received(KEY, DIGEST) == 0
    disk.fails.clear()
    with pytest.raises(UploadError):
        uploads.persist(KEY, DIGEST)
    fill(uploads)  # sent again, to another file
    uploads.persist(KEY, DIGEST)


@pytest.mark.fault("F8")
def test_a_file_whose_sync_failed_is_never_believed(tmp_path: Path, disk: Disk) -> None:
    """Two reports of one update come at a time: the second one's sync would succeed."""
    file = SpoolFile(tmp_path / "file", DIGEST)
    file.path.write_bytes(DATA)
    disk.fails["file"] = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        file.sync()
    disk.fails.clear()
    with pytest.raises(OSError, match="failed before"):
        file.sync()
    assert disk.synced == ["file"]


@pytest.mark.fault("F8")
def test_a_folder_whose_sync_failed_is_never_believed(uploads: UploadStore, disk: Disk) -> None:
    fill(uploads)
    fill(uploads, KEY._replace(client_id="b"))
    disk.fails["folder"] = errno.EIO
    with pytest.raises(SpoolError):
        uploads.persist(KEY, DIGEST)
    disk.fails.clear()
    for key in (KEY, KEY._replace(client_id="b")):
        with pytest.raises(SpoolError, match="could not be synced before"):
            uploads.persist(key, DIGEST)
    later = KEY._replace(attempt=3)
    fill(uploads, later)
    uploads.persist(later, DIGEST)


def test_an_attempt_whose_folder_cannot_be_made_durable_begins_again(uploads: UploadStore, disk: Disk) -> None:
    disk.fails["folder"] = errno.EIO
    with pytest.raises(BlobError):
        uploads.open(KEY, DIGEST, len(DATA), 0)
    assert list(uploads.folder.iterdir()) == []
    disk.fails.clear()
    fill(uploads)


# --- kept over a restart -------------------------------------------------------------------------------------


@pytest.mark.fault("F2", "F14")
def test_only_attempts_that_go_on_are_kept_with_what_had_arrived(uploads: UploadStore) -> None:
    partial, other = KEY._replace(client_id="partial"), KEY._replace(attempt=1)
    fill(uploads)
    upload = uploads.open(partial, DIGEST, len(DATA), 0)
    upload.write(DATA[:100])
    fill(uploads, other)
    (uploads.folder / "stray").write_bytes(b"x")

    again = UploadStore(uploads.folder)
    again.keep([KEY[:3], ("job", 7, 7)])
    assert again.complete(KEY, DIGEST) is not None
    assert again.complete(other, DIGEST) is None
    assert again.received(partial, DIGEST) == 100
    assert len([path for path in uploads.folder.rglob("*") if path.is_file()]) == 2
    resumed = again.open(partial, DIGEST, len(DATA), 100)
    resumed.write(DATA[100:])
    assert resumed.finish().read_bytes() == DATA


def test_what_an_earlier_process_left_goes_when_other_bytes_come(uploads: UploadStore) -> None:
    upload = uploads.open(KEY, DIGEST, len(DATA), 0)
    upload.write(DATA[:100])
    again = UploadStore(uploads.folder)
    again.keep([KEY[:3]])
    assert fill(again, data=b"other").read_bytes() == b"other"
    assert len([path for path in uploads.folder.rglob("*") if path.is_file()]) == 1


def test_a_file_that_is_damaged_is_not_taken_for_the_update(uploads: UploadStore) -> None:
    path = fill(uploads)
    path.write_bytes(DATA[:-1] + b"x")
    again = UploadStore(uploads.folder)
    again.keep([KEY[:3]])
    assert again.complete(KEY, DIGEST) is None


# --- in memory -----------------------------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_updates_in_memory_never_touch_the_disk(tmp_path: Path, disk: Disk) -> None:
    uploads = UploadStore(tmp_path / "uploads", lambda job_id: job_id == "job")
    before = open_files()
    upload = uploads.open(KEY, DIGEST, len(DATA), 0)
    upload.write(DATA[:100])
    upload.close()
    assert uploads.received(KEY, DIGEST) == 100
    upload = uploads.open(KEY, DIGEST, len(DATA), 100)
    upload.write(DATA[100:])
    assert upload.finish().read_bytes() == DATA
    path = uploads.complete(KEY, DIGEST)
    assert path is not None
    uploads.persist(KEY, DIGEST)
    assert path.read_bytes() == DATA
    assert (list(uploads.folder.iterdir()), disk.synced) == ([], [])
    uploads.discard(KEY)
    uploads.discard(KEY)
    assert uploads.complete(KEY, DIGEST) is None
    assert open_files() == before


def test_memory_is_freed_with_its_attempt(tmp_path: Path) -> None:
    uploads = UploadStore(tmp_path / "uploads", lambda _: True)
    before = open_files()
    for name in "abc":
        upload = uploads.open(KEY._replace(client_id=name), OTHER, 100, 0)
        upload.write(b"xyz")
    assert open_files() == before + 6
    uploads.discard_attempt("job", 1, 2)
    assert open_files() == before


def test_a_file_in_memory_is_closed_once() -> None:
    file = MemoryFile(DIGEST)
    file.remove()
    file.gone = True
    number = os.open("/dev/null", os.O_RDONLY)  # takes the number that has become free
    file.remove()
    os.fstat(number)
    os.close(number)
