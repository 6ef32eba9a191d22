"""Updates that are received into the files of merged ones: no reader sees a byte of the earlier update."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.model.running_norm import RunningNorm
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.events import JobAction, OperatorCommand
from fedplat_server import crash_points, instruments
from fedplat_server.errors import BlobError, BlobFullError, UploadError
from fedplat_server.storage import files, spare_files
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_file import name_attempt, spool_path_of
from fedplat_server.verify.files import ExpectedUpdates, SpoolFolder
from support.crash import points
from support.rounds.driver import collecting

FIRST, SECOND, OTHER_JOB = (
    AssignmentId(AttemptKey(job, round_, 1), "c") for job, round_ in (("job", 1), ("job", 2), ("other", 1))
)
PARAMETERS = Parameters.from_arrays({"weight": np.arange(500, dtype="f4")})
UPDATE = PARAMETERS.to_bytes()
DIGEST = hashlib.sha256(UPDATE).hexdigest()
UPLOAD_ID = "0123456789abcdef" * 2
SECRET = b"what another client has sent "
SIZES = {"longer": len(UPDATE) + 999, "equal": len(UPDATE), "shorter": len(UPDATE) - 1, "much shorter": 70}
KNOWN = frozenset(map(name_attempt, (FIRST.attempt, SECOND.attempt, OTHER_JOB.attempt)))
OPENED: list[Spool] = []
SPARE = [point for point in points.all_points() if point.startswith("spare.")]


class Killed(BaseException):
    """The process is over."""


@pytest.fixture(autouse=True)
def quick_marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(files, "WRITEBACK_BYTES", 500)
    yield
    while OPENED:  # a full disk in another test gets back what they have
        OPENED.pop().spare.close()


def open_spool(folder: Path, needed: Sequence[AssignmentId] = (FIRST, SECOND, OTHER_JOB)) -> Spool:
    """A spool after a start, of jobs whose files may be reused."""
    spool = Spool(folder)
    OPENED.append(spool)
    spool.spare.takes = lambda key, size_bytes: True
    spool.keep(list(needed), KNOWN)
    return spool


def earlier_bytes(size: int) -> bytes:
    return (SECRET * (size // len(SECRET) + 1))[:size]


def accept(spool: Spool, key: AssignmentId, content: bytes) -> Path:
    """Receives an update and makes it durable."""
    digest = hashlib.sha256(content).hexdigest()
    receive(spool, key, content, digest)
    path = spool.complete(key, digest)
    assert path is not None
    assert spool.persist(key, digest) == len(content)
    return path


def receive(spool: Spool, key: AssignmentId, content: bytes, name: str) -> None:
    start = spool.count_received(key, name)
    upload = spool.open(key, name, len(content), start)
    for at in range(start, len(content), 400):
        upload.write(content[at : at + 400])
    upload.finish()


def merge(spool: Spool, key: AssignmentId, size: int = SIZES["longer"]) -> int:
    """Receives an update that is not needed any more, and returns its inode."""
    inode = accept(spool, key, earlier_bytes(size)).stat().st_ino
    spool.discard(key)
    return inode


def spare_paths(spool: Spool) -> list[Path]:
    return sorted((spool.folder / spare_files.FOLDER).glob("*"))


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return open_spool(tmp_path / "uploads")


# --- what is received --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", [DIGEST, UPLOAD_ID])
def test_an_update_in_reused_room_has_its_own_bytes_only(spool: Spool, size: int, name: str) -> None:
    inode = merge(spool, FIRST, size)
    (spare,) = spare_paths(spool)
    assert (spare.stat().st_ino, spool.spare.size_bytes) == (inode, size)
    norm = RunningNorm(PARAMETERS.schema)
    upload = spool.open(SECOND, name, len(UPDATE), 0)
    upload.write(UPDATE[:600])
    upload.close()
    assert spool.count_received(SECOND, name) == 600
    assert spool.complete(SECOND, DIGEST, UPLOAD_ID if name == UPLOAD_ID else "") is None
    if name == UPLOAD_ID:  # its report came too early, so it begins again
        assert spool.count_received(SECOND, name) == 0
    upload = spool.open(SECOND, name, len(UPDATE), spool.count_received(SECOND, name), norm)
    upload.write(UPDATE[upload.received :])
    upload.finish()
    path = spool.complete(SECOND, DIGEST, UPLOAD_ID if name == UPLOAD_ID else "")
    assert path is not None
    assert path == spool_path_of(spool.folder, SECOND, DIGEST)
    assert path.read_bytes() == UPDATE
    assert path.stat().st_ino == inode
    assert norm.position == len(UPDATE)
    assert spool.persist(SECOND, DIGEST) == len(UPDATE)
    assert spare_paths(spool) == []
    assert [each for each in spool.folder.rglob("*") if each.is_file()] == [path]


def test_no_name_that_is_read_shows_an_update_before_it_is_complete(spool: Spool) -> None:
    merge(spool, FIRST)
    plain = spool_path_of(spool.folder, SECOND, DIGEST)
    upload = spool.open(SECOND, DIGEST, len(UPDATE), 0)
    marks: list[int] = []
    for at in range(0, len(UPDATE), 400):
        upload.write(UPDATE[at : at + 400])
        (path,) = plain.parent.iterdir()
        marks.append(int(path.name.rpartition(".")[2]))
        assert path.name == f"{plain.name}.{marks[-1]}"
        assert marks[-1] <= at + 400
        assert path.read_bytes().startswith(UPDATE[: at + 400])
    assert marks == sorted(marks)
    assert len({*marks}) > 2
    upload.finish()
    assert list(plain.parent.iterdir()) == [plain]


def test_wrong_bytes_begin_again_in_the_same_file(spool: Spool) -> None:
    inode = merge(spool, FIRST)
    with pytest.raises(UploadError, match="resume at 0"):
        receive(spool, SECOND, UPDATE[:-1] + b"x", DIGEST)
    receive(spool, SECOND, UPDATE, DIGEST)
    path = spool.complete(SECOND, DIGEST)
    assert path is not None
    assert (path.read_bytes(), path.stat().st_ino) == (UPDATE, inode)


# --- after a kill ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("received", [0, 100, 900, len(UPDATE) - 1])
def test_a_killed_upload_resumes_at_its_mark(spool: Spool, received: int) -> None:
    merge(spool, FIRST)
    upload = spool.open(SECOND, DIGEST, len(UPDATE), 0)
    for at in range(0, received, 100):
        upload.write(UPDATE[at : min(at + 100, received)])
    again = open_spool(spool.folder, [SECOND])
    marked = again.count_received(SECOND, DIGEST)
    assert received - 500 < marked <= received
    assert again.count_received(SECOND, hashlib.sha256(b"of another attempt").hexdigest()) == 0
    (path,) = (each for each in again.folder.rglob("*") if each.is_file())
    assert path.read_bytes() == UPDATE[:marked]
    receive(again, SECOND, UPDATE, DIGEST)
    complete = again.complete(SECOND, DIGEST)
    assert complete is not None
    assert complete.read_bytes() == UPDATE


def test_an_upload_that_was_paused_resumes_where_it_stopped(spool: Spool) -> None:
    merge(spool, FIRST)
    upload = spool.open(SECOND, UPLOAD_ID, len(UPDATE), 0)
    upload.write(UPDATE[:123])
    upload.close()
    again = open_spool(spool.folder, [SECOND])
    assert again.count_received(SECOND, UPLOAD_ID) == 123


@pytest.mark.fault("F2", "F4")
@pytest.mark.parametrize("point", SPARE)
def test_killed_at_each_step(spool: Spool, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start finds the acknowledged update, and of the others their own bytes or none."""
    accept(spool, OTHER_JOB, UPDATE)

    def live() -> None:
        merge(spool, FIRST)
        accept(spool, SECOND, UPDATE)
        spool.discard(SECOND)
        spool.spare.free()

    def kill(name: str) -> None:
        if name == point:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(crash_points, "point", kill)
        with pytest.raises(Killed):
            live()
    listed = SpoolFolder(spool.folder)
    listed.list_updates()
    kept = {OTHER_JOB: DIGEST}
    assert list(listed.check(kept)) == []
    assert [note for note in listed.notes(ExpectedUpdates(kept, {FIRST, SECOND, OTHER_JOB})) if "not an" in note] == []
    again = open_spool(spool.folder, [SECOND, OTHER_JOB])
    assert not (again.folder / spare_files.FOLDER).exists()
    content = b"".join(path.read_bytes() for path in again.folder.rglob("*") if path.is_file())
    assert SECRET not in content
    path = again.complete(OTHER_JOB, DIGEST)
    assert path is not None
    assert path.read_bytes() == UPDATE
    assert accept(again, SECOND, UPDATE).read_bytes() == UPDATE


@pytest.mark.fault("F3", "F4")
@pytest.mark.parametrize("left", [earlier_bytes(SIZES["longer"]), earlier_bytes(len(UPDATE)), bytes(50)])
def test_a_power_failure_that_leaves_other_bytes_costs_the_upload(spool: Spool, left: bytes) -> None:
    """The name may be durable, and neither the bytes nor the size."""
    path = accept(spool, SECOND, UPDATE)
    for name in (path.name, f"{path.name}.1500"):
        path.unlink(missing_ok=True)
        path.with_name(name).write_bytes(left)
        again = open_spool(spool.folder, [SECOND])
        assert again.complete(SECOND, DIGEST) is None
        assert again.count_received(SECOND, DIGEST) <= len(left)
        for _ in range(2):
            try:
                receive(again, SECOND, UPDATE, DIGEST)
            except UploadError:
                assert again.count_received(SECOND, DIGEST) == 0
        found = again.complete(SECOND, DIGEST)
        assert found is not None
        assert found.read_bytes() == UPDATE


# --- what is not reused ------------------------------------------------------------------------------------------


@pytest.fixture(params=["descriptor", "mapping"])
def reader(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Opens a path as a fold does that was cut off."""
    opened: list[Any] = []

    def read(path: Path) -> None:
        file = path.open("rb")
        opened.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if request.param == "mapping" else file)
        if request.param == "mapping":
            file.close()

    yield read
    for each in opened:
        each.close()


def test_a_file_that_somebody_reads_is_not_reused(spool: Spool, reader: Any) -> None:
    path = accept(spool, FIRST, earlier_bytes(SIZES["longer"]))
    inode = path.stat().st_ino
    reader(path)
    spool.discard(FIRST)
    assert accept(spool, SECOND, UPDATE).stat().st_ino != inode
    assert spare_paths(spool) == []


def test_only_durable_files_of_this_process_are_kept(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    receive(spool, FIRST, UPDATE, DIGEST)  # not reported
    spool.discard(FIRST)
    assert spare_paths(spool) == []
    receive(spool, FIRST, UPDATE, DIGEST)
    assert spool.complete(FIRST, DIGEST) is not None
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_to_sync)
        with pytest.raises(BlobError):
            spool.persist(FIRST, DIGEST)
    assert spare_paths(spool) == []
    accept(spool, FIRST, UPDATE)
    again = open_spool(spool.folder)
    accept(again, FIRST, UPDATE)
    again.discard(FIRST)
    assert [path for path in again.folder.rglob("*") if path.is_file()] == []


def fail_to_sync(descriptor: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_jobs_whose_updates_must_go_leave_no_files(spool: Spool) -> None:
    spool.spare.takes = lambda key, size_bytes: False
    merge(spool, FIRST)
    assert [path for path in spool.folder.rglob("*") if path.is_file()] == []


def test_another_job_does_not_get_the_file(spool: Spool) -> None:
    inode = merge(spool, FIRST)
    assert accept(spool, OTHER_JOB, UPDATE).stat().st_ino != inode
    assert len(spare_paths(spool)) == 1
    assert accept(spool, SECOND, UPDATE).stat().st_ino == inode


def test_without_leases_files_are_removed(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int, argument: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    merge(spool, FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", refuse)
        assert accept(spool, SECOND, UPDATE).read_bytes() == UPDATE
    spool.discard(SECOND)
    assert spare_paths(spool) == []


# --- how much, and how long --------------------------------------------------------------------------------------


def test_there_are_never_more_files_than_were_needed_at_once(spool: Spool) -> None:
    for round_ in range(1, 5):
        keys = [AssignmentId(AttemptKey("job", round_, 1), f"c{number}") for number in range(3)]
        spool.expect(keys)
        for key in keys:
            accept(spool, key, UPDATE)
            assert len([path for path in spool.folder.rglob("*") if path.is_file()]) <= 3
        for key in keys:
            spool.discard(key)
        assert len(spare_paths(spool)) == 3


@pytest.mark.fault("F7")
def test_a_full_disk_gets_them_back_before_an_upload_fails(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    merge(spool, FIRST)
    upload = spool.open(OTHER_JOB, DIGEST, len(UPDATE), 0)
    write, full = os.pwrite, [True]

    def fill(descriptor: int, data: memoryview, position: int) -> int:
        if spare_paths(spool) or not full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", fill)
    upload.write(UPDATE[:100])
    assert (spare_paths(spool), spool.spare.size_bytes) == ([], 0)
    full.clear()
    with pytest.raises(BlobFullError):
        upload.write(UPDATE[100:])
    full.append(True)
    upload.write(UPDATE[100:])
    assert upload.finish().read_bytes() == UPDATE


def test_a_full_disk_of_models_or_the_database_gets_them_back(spool: Spool) -> None:
    merge(spool, FIRST)
    instruments.note_full("database")
    assert spare_paths(spool) == []


def set_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, total: int, free: int) -> None:
    usage = shutil.disk_usage(folder)._replace(total=total, free=free)

    def disk_usage(path: Path) -> object:
        return usage

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)


def test_on_a_disk_with_little_room_nothing_is_kept(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_disk(monkeypatch, spool.folder, 10**9, 10**8 - 1)
    merge(spool, FIRST)
    assert spare_paths(spool) == []
    set_disk(monkeypatch, spool.folder, 4000, SIZES["longer"] - 1)
    merge(spool, FIRST)
    assert spare_paths(spool) == []


async def test_they_go_with_the_daemon(spool: Spool) -> None:
    merge(spool, FIRST)
    listed = SpoolFolder(spool.folder)
    listed.list_updates()
    (note,) = listed.notes(ExpectedUpdates())
    assert note.startswith("1 files of merged updates are kept for the next updates")
    await spool.close()
    assert list(spool.folder.glob(f"{spare_files.FOLDER}*")) == []
    merge(spool, SECOND)
    assert spare_paths(spool) == []


@pytest.mark.parametrize("action", [JobAction.CANCEL, JobAction.PAUSE])
async def test_they_go_with_the_job(tmp_path: Path, action: JobAction, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = collecting(2, goal=2)
    spool = open_spool(tmp_path / "uploads", [each.id for each in driver.job.open_assignments])
    accepted = [AssignmentId(driver.key, client_id) for client_id in ("c0", "c1")]
    for key in accepted:
        accept(spool, key, UPDATE)
    spool.on_stored(driver.report("c0", "c1").changes)
    spool.on_stored(driver.commit().changes)
    await wait_until_deleted(spool)
    assert len(spare_paths(spool)) == 2, "its next attempt may need them"
    monkeypatch.setattr(spare_files, "IDLE_S", 0.0)
    spool.on_stored(driver.do(OperatorCommand("j", action)).changes)
    while spare_paths(spool):
        await asyncio.sleep(0.001)
    await spool.close()


async def wait_until_deleted(spool: Spool) -> None:
    while any(path.is_file() for path in spool.folder.rglob("*-*")):
        await asyncio.sleep(0.001)
