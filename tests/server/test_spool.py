"""Uploads that outlive the process, uploads that never touch the disk, and syncs that fail."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from pathlib import Path

import pytest

from fedplat.rounds import AssignmentId, AttemptKey, Proposal, Verdict
from fedplat.rounds.events import ClientRevoked, JobAction, OperatorCommand
from fedplat.rounds.states import AttemptPhase, Reason
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.errors import BlobError, BlobFullError, RefusedError, SpoolError, UploadError
from fedplat_server.rpc.report_intake import ReceivedUpdate, receive_small, receive_update
from fedplat_server.storage import spool
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_file import MemoryFile, SpoolFile, name_attempt, spool_path_of
from support.rounds.buffers import FIRST, buffered
from support.rounds.driver import Driver, collecting

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).hexdigest()
REPORT = fleet_pb2.ReportRequest(digest=DIGEST, update=DATA)
OTHER = hashlib.sha256(b"other").hexdigest()
KEY = AssignmentId(AttemptKey("job", 1, 2), "client")
OTHER_CLIENT = KEY._replace(client_id="b")
EARLIER, LATER = (KEY._replace(attempt=AttemptKey("job", 1, number)) for number in (1, 3))


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
def uploads(tmp_path: Path) -> Spool:
    spool = Spool(tmp_path / "uploads")
    spool.expect([KEY, OTHER_CLIENT, EARLIER, LATER])
    return spool


def take_rows(uploads: Spool) -> None:
    """Small updates may be rows of the database."""
    uploads.stores_row = lambda key, size_bytes: size_bytes <= len(DATA)


def fill(uploads: Spool, key: AssignmentId = KEY, data: bytes = DATA) -> Path:
    digest = hashlib.sha256(data).hexdigest()
    upload = uploads.open(key, digest, len(data), uploads.count_received(key, digest))
    upload.write(data)
    upload.close()
    path = uploads.complete(key, digest)
    assert path is not None
    return path


# --- rows --------------------------------------------------------------------------------------------------------


def test_a_row_is_in_memory_until_its_assignment_ends(uploads: Spool, disk: Disk) -> None:
    take_rows(uploads)
    assert uploads.hold_row(KEY, DIGEST, DATA)
    assert uploads.hold_row(KEY, DIGEST, DATA)  # a duplicate report
    path = uploads.complete(KEY, DIGEST)
    assert path is not None
    assert (path.read_bytes(), uploads.count_received(KEY, DIGEST)) == (DATA, len(DATA))
    assert uploads.find_row(KEY, DIGEST) == DATA
    assert (uploads.find_row(KEY, OTHER), uploads.find_row(OTHER_CLIENT, DIGEST)) == (None, None)
    with pytest.raises(UploadError, match="reported for this assignment already"):
        uploads.hold_row(KEY, OTHER, b"other")
    assert (disk.synced, list(uploads.folder.iterdir())) == ([], [])
    uploads.discard(KEY)
    assert uploads.find_row(KEY, DIGEST) is None
    assert not uploads.hold_row(OTHER_CLIENT, OTHER, DATA + b"too large")
    with pytest.raises(UploadError, match="has ended"):
        uploads.hold_row(KEY._replace(client_id="gone"), DIGEST, DATA)


def test_a_row_replaces_a_part_of_the_update_and_an_update_that_was_never_reported(uploads: Spool) -> None:
    take_rows(uploads)
    upload = uploads.open(KEY, DIGEST, len(DATA), 0)
    upload.write(DATA[:9])
    assert uploads.hold_row(KEY, DIGEST, DATA)
    with pytest.raises(UploadError, match="another call continues it"):
        upload.write(DATA[9:])
    other = uploads.open(OTHER_CLIENT, OTHER, 5, 0)
    other.close()
    assert uploads.hold_row(OTHER_CLIENT, DIGEST, DATA)
    assert [path for path in uploads.folder.rglob("*") if path.is_file()] == []
    again = uploads.open(KEY, DIGEST, len(DATA), len(DATA))
    assert again.finish().read_bytes() == DATA


def test_a_row_never_replaces_an_update_that_is_about_to_count(uploads: Spool) -> None:
    take_rows(uploads)
    path = fill(uploads)
    assert uploads.complete(KEY, DIGEST) == path, "its report has begun"
    assert not uploads.hold_row(KEY, DIGEST, DATA)
    assert path.exists()
    uploads.discard(KEY)
    assert uploads.hold_row(KEY, DIGEST, DATA)
    with pytest.raises(UploadError, match="report it again"):
        uploads.persist(KEY, DIGEST)


def test_rows_beyond_the_number_are_files(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "MAX_ROWS", 1)
    uploads = Spool(tmp_path)
    uploads.expect([KEY, OTHER_CLIENT, EARLIER, LATER])
    take_rows(uploads)
    assert uploads.hold_row(KEY, DIGEST, DATA)
    assert not uploads.hold_row(OTHER_CLIENT, DIGEST, DATA)
    uploads.restore_rows({EARLIER: (DIGEST, DATA), LATER: (OTHER, b"damaged")})
    path = uploads.complete(EARLIER, DIGEST)
    assert path == spool_path_of(uploads.folder, EARLIER, DIGEST)
    assert uploads.persist(EARLIER, DIGEST) == len(DATA), "the row is durable"
    assert "file" not in disk.synced
    assert uploads.complete(LATER, OTHER) is None


def test_a_restored_row_replaces_a_damaged_file(tmp_path: Path) -> None:
    before = Spool(tmp_path)
    before.expect([KEY])
    take_rows(before)
    before.hold_row(KEY, DIGEST, DATA)
    before.hand_over()
    path = spool_path_of(tmp_path, KEY, DIGEST)
    assert path.read_bytes() == DATA
    path.write_bytes(b"torn")
    after = Spool(tmp_path)
    after.keep([KEY])
    after.restore_rows({KEY: (DIGEST, DATA)})
    assert not path.exists()
    found = after.complete(KEY, DIGEST)
    assert found is not None
    assert found.read_bytes() == DATA


@pytest.mark.parametrize("again", [REPORT, fleet_pb2.ReportRequest(digest=DIGEST)])
def test_a_report_in_a_row_comes_with_its_bytes(uploads: Spool, again: fleet_pb2.ReportRequest) -> None:
    """Also if its first report was not stored, and the second one names the digest only."""
    take_rows(uploads)
    receive_update(uploads, KEY, REPORT, lambda path, _: 2.0)
    received = receive_update(uploads, KEY, again, lambda path, _: 2.0)
    assert received == ReceivedUpdate(len(DATA), 2.0, DATA)


def test_a_small_update_is_received_at_once(uploads: Spool) -> None:
    take_rows(uploads)
    assert receive_small(uploads, KEY, REPORT, lambda _: Verdict(Reason.REJECTED_NONFINITE)) == Verdict(
        Reason.REJECTED_NONFINITE
    )
    uploads.discard(KEY)
    assert receive_small(uploads, KEY, REPORT, lambda content: float(len(content))) == ReceivedUpdate(
        len(DATA), float(len(DATA)), DATA
    )
    assert uploads.find_row(KEY, DIGEST) == DATA
    assert receive_small(uploads, KEY, REPORT, lambda _: 2.0) is None  # it is there already
    wrong = fleet_pb2.ReportRequest(digest="0" * 64, update=DATA)
    assert receive_small(uploads, KEY, wrong, lambda _: 2.0) == Verdict(Reason.REJECTED_DIGEST)
    ended = AssignmentId(KEY.attempt, "gone")
    with pytest.raises(RefusedError, match="the assignment has ended"):
        receive_small(uploads, ended, REPORT, lambda _: 2.0)


def test_a_small_update_that_would_wait_needs_a_thread(uploads: Spool) -> None:
    assert receive_small(uploads, KEY, REPORT, lambda _: 2.0) is None  # it is no row
    take_rows(uploads)
    with uploads._lock:  # pyright: ignore[reportPrivateUsage]
        assert receive_small(uploads, KEY, REPORT, lambda _: 2.0) is None
    begun = uploads.open(KEY, DIGEST, len(DATA), 0)
    begun.write(DATA[:3])
    assert receive_small(uploads, KEY, REPORT, lambda _: 2.0) is None  # it would remove a file


# --- made durable --------------------------------------------------------------------------------------------


def test_an_update_and_its_folder_are_synced_once(uploads: Spool, disk: Disk) -> None:
    fill(uploads)
    assert disk.synced == ["folder"]  # the folder of the folders
    uploads.persist(KEY, DIGEST)
    assert disk.synced == ["folder", "file", "folder"]
    uploads.persist(KEY, DIGEST)
    assert len(disk.synced) == 3


def test_what_is_not_there_cannot_be_made_durable(uploads: Spool) -> None:
    with pytest.raises(UploadError, match="update is missing"):
        uploads.persist(KEY, DIGEST)


@pytest.mark.fault("F8")
@pytest.mark.parametrize(("code", "error"), [(errno.EIO, BlobError), (errno.ENOSPC, BlobFullError)])
def test_a_sync_that_failed_means_not_written(uploads: Spool, disk: Disk, code: int, error: type[BlobError]) -> None:
    fill(uploads)
    disk.fails["file"] = code
    with pytest.raises(error):
        uploads.persist(KEY, DIGEST)
    assert uploads.complete(KEY, DIGEST) is None
    assert uploads.count_received(KEY, DIGEST) == 0
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
    with pytest.raises(OSError, match="sync of the file failed"):
        file.sync()
    assert disk.synced == ["file"]


@pytest.mark.fault("F8")
def test_a_folder_whose_sync_failed_is_never_believed(uploads: Spool, disk: Disk) -> None:
    fill(uploads)
    fill(uploads, OTHER_CLIENT)
    disk.fails["folder"] = errno.EIO
    with pytest.raises(SpoolError):
        uploads.persist(KEY, DIGEST)
    disk.fails.clear()
    for key in (KEY, OTHER_CLIENT):
        with pytest.raises(SpoolError, match="an earlier sync of"):
            uploads.persist(key, DIGEST)
    fill(uploads, LATER)
    uploads.persist(LATER, DIGEST)


def test_an_attempt_whose_folder_cannot_be_made_durable_begins_again(uploads: Spool, disk: Disk) -> None:
    disk.fails["folder"] = errno.EIO
    with pytest.raises(BlobError):
        uploads.open(KEY, DIGEST, len(DATA), 0)
    assert list(uploads.folder.iterdir()) == []
    disk.fails.clear()
    fill(uploads)


# --- kept over a restart -------------------------------------------------------------------------------------


@pytest.mark.fault("F2", "F14")
def test_only_what_is_needed_is_kept_with_what_had_arrived(uploads: Spool) -> None:
    partial, needless = OTHER_CLIENT, KEY._replace(client_id="c")
    uploads.expect([needless])
    fill(uploads)
    fill(uploads, needless)
    upload = uploads.open(partial, DIGEST, len(DATA), 0)
    upload.write(DATA[:100])
    fill(uploads, EARLIER)
    (uploads.folder / "stray").write_bytes(b"x")

    again = Spool(uploads.folder)
    again.keep([KEY, partial, LATER], {name_attempt(EARLIER.attempt)})
    assert again.complete(KEY, DIGEST) is not None
    assert again.complete(EARLIER, DIGEST) is None
    assert again.complete(needless, DIGEST) is None
    assert again.count_received(partial, DIGEST) == 100
    assert len([path for path in uploads.folder.rglob("*") if path.is_file()]) == 3
    assert (uploads.folder / "stray").exists()  # the operator's
    resumed = again.open(partial, DIGEST, len(DATA), 100)
    resumed.write(DATA[100:])
    assert resumed.finish().read_bytes() == DATA


def test_a_folder_that_an_earlier_process_has_made_is_synced_at_the_start(uploads: Spool, disk: Disk) -> None:
    """That process may have been killed between the two: then a power failure would take the update with it."""
    fill(uploads)
    disk.synced.clear()
    again = Spool(uploads.folder)
    again.keep([KEY])
    assert disk.synced == ["folder", "folder"]  # that above the spool's, and the spool's
    again.persist(KEY, DIGEST)
    assert disk.synced == ["folder", "folder", "file", "folder"]


def test_what_an_earlier_process_left_goes_when_other_bytes_come(uploads: Spool) -> None:
    upload = uploads.open(KEY, DIGEST, len(DATA), 0)
    upload.write(DATA[:100])
    again = Spool(uploads.folder)
    again.keep([KEY])
    assert fill(again, data=b"other").read_bytes() == b"other"
    assert len([path for path in uploads.folder.rglob("*") if path.is_file()]) == 1


def test_a_file_that_is_damaged_is_not_taken_for_the_update(uploads: Spool) -> None:
    path = fill(uploads)
    path.write_bytes(DATA[:-1] + b"x")
    again = Spool(uploads.folder)
    again.keep([KEY])
    assert again.complete(KEY, DIGEST) is None


@pytest.mark.parametrize("left", [bytes(len(DATA)), bytes(len(DATA) + 7), DATA[:50] + bytes(20)])
def test_an_update_in_its_report_replaces_what_a_power_failure_has_left(uploads: Spool, left: bytes) -> None:
    """The next report succeeds: each further one would be incomplete if the file stayed as it is."""
    fill(uploads).write_bytes(left)
    again = Spool(uploads.folder)
    again.keep([KEY])
    with pytest.raises(RefusedError, match="report again"):
        receive_update(again, KEY, REPORT, lambda path, _: 1.0)
    assert receive_update(again, KEY, REPORT, lambda path, _: 1.0) == ReceivedUpdate(len(DATA), 1.0)


# --- in memory -----------------------------------------------------------------------------------------------


def open_files() -> int:
    """The number of files in memory; connections of other tests of this process may end at any time."""
    folder, count = Path("/proc/self/fd"), 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(path).startswith("/memfd:")
    return count


def test_updates_in_memory_never_touch_the_disk(tmp_path: Path, disk: Disk) -> None:
    uploads = Spool(tmp_path / "uploads", lambda job_id: job_id == "job")
    uploads.expect([KEY])
    before = open_files()
    upload = uploads.open(KEY, DIGEST, len(DATA), 0)
    upload.write(DATA[:100])
    upload.close()
    assert uploads.count_received(KEY, DIGEST) == 100
    upload = uploads.open(KEY, DIGEST, len(DATA), 100)
    upload.write(DATA[100:])
    assert upload.finish().read_bytes() == DATA
    path = uploads.complete(KEY, DIGEST)
    assert path is not None
    uploads.persist(KEY, DIGEST)
    assert path.read_bytes() == DATA
    assert (list(uploads.folder.iterdir()), disk.synced) == ([], ["folder"])  # the one above the spool's own
    uploads.discard(KEY)
    uploads.discard(KEY)
    assert uploads.complete(KEY, DIGEST) is None
    assert open_files() == before


def test_a_file_in_memory_is_closed_once() -> None:
    file = MemoryFile(DIGEST)
    file.remove()
    file.gone = True
    number = os.open("/dev/null", os.O_RDONLY)  # takes the number that has become free
    file.remove()
    os.fstat(number)
    os.close(number)


# --- deleted by stored changes -------------------------------------------------------------------------------


class Followed:
    """A spool that follows the changes of a job."""

    def __init__(self, folder: Path, driver: Driver, *, in_memory: bool = False) -> None:
        self.driver = driver
        self.spool = Spool(folder / "uploads", lambda _: in_memory)
        self.spool.expect(each.id for each in driver.job.open_assignments)

    def send(self, *client_ids: str, num_bytes: int = len(DATA)) -> None:
        """Clients upload the first bytes of their updates."""
        for client_id in client_ids:
            key = AssignmentId(self.driver.key_of(client_id), client_id)
            upload = self.spool.open(key, DIGEST, len(DATA), 0)
            upload.write(DATA[:num_bytes])
            upload.close()

    async def after(self, proposal: Proposal) -> set[str]:
        """The clients whose updates are there after a change and its deletions; fails if an empty folder is left."""
        self.spool.on_stored(proposal.changes)
        await self.spool.close()
        folders = [path for path in self.spool.folder.iterdir() if not any(path.iterdir())]
        assert folders == []
        keys = [AssignmentId(self.driver.key, f"c{number}") for number in range(4)]
        names = {path.name.partition("-")[0] for path in self.spool.folder.rglob("*-*")}
        return {key.client_id for key in keys if spool_path_of(self.spool.folder, key, "").name[:-1] in names}


async def test_an_update_goes_with_its_assignment_and_the_others_with_the_version(tmp_path: Path) -> None:
    driver = collecting(4, goal=4)
    followed = Followed(tmp_path, driver)
    followed.send("c0", num_bytes=100)
    followed.send("c1", "c2")
    gone = AssignmentId(driver.key, "c0")
    assert await followed.after(driver.give_up("c0")) == {"c1", "c2"}
    with pytest.raises(UploadError, match="the assignment has ended"):
        followed.spool.open(gone, DIGEST, len(DATA), 0)
    followed.send("c3", num_bytes=100)
    assert await followed.after(driver.report("c1", "c2")) == {"c1", "c2", "c3"}
    assert await followed.after(driver.give_up("c3")) == {"c1", "c2"}
    assert driver.attempt.phase is AttemptPhase.COMMITTING
    assert await followed.after(driver.commit()) == set()
    assert list(followed.spool.folder.iterdir()) == []


async def test_an_update_that_was_accepted_and_dropped_stays_while_it_may_be_read(tmp_path: Path) -> None:
    driver = collecting(4, goal=4)
    followed = Followed(tmp_path, driver)
    followed.send("c0", "c1")
    assert await followed.after(driver.report("c0", "c1")) == {"c0", "c1"}
    assert await followed.after(driver.do(ClientRevoked("c0"))) == {"c0", "c1"}
    assert driver.reasons()["c0"] == "REVOKED"
    assert await followed.after(driver.do(OperatorCommand("j", JobAction.CANCEL))) == set()


async def test_in_a_buffer_an_update_goes_with_the_version_that_it_is_in(tmp_path: Path) -> None:
    driver = buffered(3)
    followed = Followed(tmp_path, driver)
    followed.send("c0", "c1", "c2")
    assert await followed.after(driver.report("c0", "c1")) == {"c0", "c1", "c2"}
    assert driver.attempt.phase is AttemptPhase.COMMITTING
    assert await followed.after(driver.report("c2")) == {"c0", "c1", "c2"}  # waits for the next attempt
    followed.spool.on_stored(driver.commit().changes)
    await followed.spool.close()
    (left,) = followed.spool.folder.rglob("*-*")
    assert left == spool_path_of(followed.spool.folder, AssignmentId(FIRST, "c2"), DIGEST)


async def test_memory_is_freed_with_its_attempt(tmp_path: Path) -> None:
    driver = collecting(3, goal=3)
    followed = Followed(tmp_path, driver, in_memory=True)
    before = open_files()
    followed.send("c0", "c1", "c2")
    assert open_files() == before + 3
    await followed.after(driver.do(OperatorCommand("j", JobAction.CANCEL)))
    assert open_files() == before


async def test_updates_that_cannot_be_deleted_harm_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = collecting(2)
    followed = Followed(tmp_path, driver)
    followed.send("c0", "c1")

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shutil, "rmtree", fail)
    followed.spool.on_stored(driver.do(OperatorCommand("j", JobAction.CANCEL)).changes)
    await followed.spool.close()
