"""Updates that become records of a segment: one sync for all that wait, and what failures and crashes leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat_server.errors import BlobError, BlobFullError, UploadError
from fedplat_server.storage import files, segments
from fedplat_server.storage.segments import Segments, list_segments, read_records
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_file import name_attempt, spool_path_of

pytestmark = pytest.mark.calm("says itself what fails when")
KEYS = [AssignmentId(AttemptKey("job", 1, 1), f"client {number}") for number in range(4)]
LATER = KEYS[0]._replace(attempt=AttemptKey("job", 2, 1))
OTHER_JOB = KEYS[0]._replace(attempt=AttemptKey("other", 1, 1))
KNOWN = frozenset(name_attempt(key.attempt) for key in (KEYS[0], LATER, OTHER_JOB))


def content_of(key: AssignmentId) -> bytes:
    return repr(key).encode() * 200


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def open_spool(folder: Path) -> Spool:
    records = Segments(folder / "segments")
    records.stores_record = lambda key, size_bytes: True
    return Spool(folder / "uploads", segments=records)


@pytest.fixture
def uploads(tmp_path: Path) -> Spool:
    uploads = open_spool(tmp_path)
    uploads.expect([*KEYS, LATER, OTHER_JOB])
    return uploads


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The syncs of files and folders; those of segments are of data only."""
    calls: list[int] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, calls.append)
    return calls


def fail_syncs(monkeypatch: pytest.MonkeyPatch, code: int = errno.EIO) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fdatasync", fail)


def receive(uploads: Spool, key: AssignmentId) -> str:
    """An update that is complete, and the digest of its report."""
    content = content_of(key)
    digest = digest_of(content)
    upload = uploads.open(key, digest, len(content), uploads.count_received(key, digest))
    upload.write(content)
    upload.finish()
    upload.close()
    assert uploads.complete(key, digest) is not None
    assert uploads.find_open(key, digest) is not None
    return digest


async def store(uploads: Spool, *keys: AssignmentId) -> None:
    digests = [receive(uploads, key) for key in keys]
    await asyncio.gather(*(uploads.store(key, digest) for key, digest in zip(keys, digests, strict=True)))


def stored(uploads: Spool, keys: Iterable[AssignmentId]) -> list[bool]:
    """Whether the bytes of these updates are in segments, intact."""
    places = [uploads.locate(key, digest_of(content_of(key))) for key in keys]
    return [
        place is not None and place.path.parent.name == "segments" and place.read() == content_of(key)
        for place, key in zip(places, keys, strict=True)
    ]


def end(uploads: Spool, *keys: AssignmentId) -> None:
    """Ends assignments, as stored changes do."""
    for key in keys:
        uploads._updates.forget(key)  # pyright: ignore[reportPrivateUsage]
    uploads._delete(keys)  # pyright: ignore[reportPrivateUsage]


def found(folder: Path) -> list[int]:
    """The number of records in each segment."""
    return [len(list(read_records(path))) for path in list_segments(folder / "segments")]


async def test_updates_that_wait_are_synced_together_and_have_no_files(uploads: Spool, synced: list[int]) -> None:
    await store(uploads, KEYS[0])
    assert len(synced) == 3  # the folder above that of the segments, that folder, and the segment
    synced.clear()
    await store(uploads, *KEYS[1:])
    assert len(synced) == 1
    assert stored(uploads, KEYS) == [True] * 4
    assert list(uploads.folder.iterdir()) == []


async def test_only_a_sync_of_its_segment_makes_a_record_durable(uploads: Spool) -> None:
    digest = receive(uploads, KEYS[0])
    with pytest.raises(UploadError, match="report it again"):
        uploads.persist(KEYS[0], digest)
    await uploads.store(KEYS[0], digest)
    with pytest.raises(UploadError, match="report it again"):
        await uploads.store(KEYS[0], digest)
    assert uploads.complete(KEYS[0], digest) is not None, "who sends it again gets a file"
    assert uploads.persist(KEYS[0], digest) == len(content_of(KEYS[0]))


async def test_a_segment_is_used_again_once_its_assignments_have_ended(uploads: Spool, synced: list[int]) -> None:
    await store(uploads, *KEYS)
    (path,) = list_segments(uploads.folder.parent / "segments")
    end(uploads, *KEYS[1:])
    assert stored(uploads, KEYS[:1]) == [True]
    assert path.stat().st_blocks > 0
    end(uploads, KEYS[0])
    assert path.stat().st_blocks == 0
    synced.clear()
    await store(uploads, LATER)
    assert len(synced) == 1
    assert found(uploads.folder.parent) == [1]
    end(uploads, LATER)
    await uploads.close()
    assert found(uploads.folder.parent) == []


async def test_a_segment_is_removed_if_its_file_system_cannot_free_it(
    uploads: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_fallocate", None)
    await store(uploads, *KEYS)
    end(uploads, *KEYS)
    assert list_segments(uploads.folder.parent / "segments") == []
    await store(uploads, LATER)
    assert stored(uploads, [LATER]) == [True]


async def test_what_is_mapped_of_an_emptied_segment_can_be_read(uploads: Spool) -> None:
    """As by a fold of an attempt that was cut off: a file that is made shorter would end the process."""
    await store(uploads, KEYS[0])
    part = uploads.locate(KEYS[0], digest_of(content_of(KEYS[0])))
    assert part is not None
    with part.path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    end(uploads, KEYS[0])
    assert mapped[part.start : part.start + 9] == bytes(9)


async def test_each_job_has_a_segment_of_its_own(uploads: Spool) -> None:
    await store(uploads, KEYS[0], OTHER_JOB)
    assert found(uploads.folder.parent) == [1, 1]


async def test_a_full_segment_is_followed_by_another(uploads: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 2 * len(content_of(KEYS[0])))
    await store(uploads, *KEYS)
    assert found(uploads.folder.parent) == [2, 2]
    assert stored(uploads, KEYS) == [True] * 4


async def test_records_begin_on_pages_of_their_own(uploads: Spool) -> None:
    """A write that is torn damages no page of an update that was acknowledged before."""
    await store(uploads, *KEYS)
    (path,) = list_segments(uploads.folder.parent / "segments")
    parts = [record.part for record in read_records(path)]
    assert [part.read() for part in parts] == [content_of(key) for key in KEYS]
    first = [part.start // segments.PAGE_BYTES for part in parts]
    last = [(part.start + len(part.read()) - 1) // segments.PAGE_BYTES for part in parts]
    assert all(start > before for start, before in zip(first[1:], last, strict=False))


@pytest.mark.fault("F8")
async def test_a_failed_sync_fails_all_that_wait_and_ends_the_segment(
    uploads: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is being received into it is sent again, too: its bytes may be lost already."""
    await store(uploads, KEYS[0])
    digests = [receive(uploads, key) for key in KEYS[1:3]]
    begun = uploads.open(KEYS[3], digest_of(content_of(KEYS[3])), len(content_of(KEYS[3])), 0)
    with monkeypatch.context() as patch:
        fail_syncs(patch)
        failed = await asyncio.gather(
            *(uploads.store(key, digest) for key, digest in zip(KEYS[1:3], digests, strict=True)),
            return_exceptions=True,
        )
    assert [type(each) for each in failed] == [BlobError, BlobError]
    with pytest.raises(UploadError, match="resume at 0"):
        begun.write(content_of(KEYS[3])[:9])
    assert stored(uploads, KEYS) == [True, False, False, False]
    assert uploads.count_received(KEYS[1], digests[0]) == 0
    await store(uploads, *KEYS[1:])
    assert len(list_segments(uploads.folder.parent / "segments")) == 2
    assert stored(uploads, KEYS) == [True] * 4
    end(uploads, *KEYS)
    assert found(uploads.folder.parent) == [0]


@pytest.mark.fault("F8")
async def test_a_sync_that_failed_is_never_repeated(uploads: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its success would say nothing. Two reports wait for different syncs of one segment."""
    digests, records = [receive(uploads, key) for key in KEYS[:2]], uploads.segments
    assert records is not None
    first, second = (uploads.find_open(key, digest) for key, digest in zip(KEYS, digests, strict=False))
    assert first is not None
    assert second is not None
    with monkeypatch.context() as patch:
        fail_syncs(patch)
        with pytest.raises(OSError, match="Input/output"):
            first.segment.sync([first])
    with pytest.raises(OSError, match="earlier sync"):
        second.segment.sync([second])


@pytest.mark.fault("F7")
async def test_a_full_disk_leaves_the_segment_as_it_was(uploads: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    await store(uploads, KEYS[0])
    content, real = content_of(KEYS[1]), os.pwrite

    def write_some(descriptor: int, data: memoryview, position: int) -> int:
        if len(data) < 1000:
            return real(descriptor, data, position)
        real(descriptor, data[:100], position)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    upload = uploads.open(KEYS[1], digest_of(content), len(content), 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_some)
        with pytest.raises(BlobFullError):
            upload.write(content)
    await store(uploads, *KEYS[1:])
    assert found(uploads.folder.parent) == [4]
    assert stored(uploads, KEYS) == [True] * 4


async def test_a_record_that_is_never_reported_hides_no_other(uploads: Spool) -> None:
    content = content_of(KEYS[0])
    uploads.open(KEYS[0], digest_of(content), len(content), 0).write(content[:50])
    await store(uploads, *KEYS[1:])
    assert found(uploads.folder.parent) == [3]
    again = open_spool(uploads.folder.parent)
    await asyncio.to_thread(again.keep, KEYS, KNOWN)
    assert stored(again, KEYS) == [False, True, True, True]
    assert again.count_received(KEYS[0], digest_of(content)) == 0


@pytest.mark.fault("F2", "F14")
async def test_the_next_life_finds_what_is_needed_and_removes_the_rest(uploads: Spool) -> None:
    await store(uploads, *KEYS)
    await store(uploads, OTHER_JOB)
    again = open_spool(uploads.folder.parent)
    await asyncio.to_thread(again.keep, KEYS[:2], KNOWN)
    assert stored(again, KEYS[:3]) == [True, True, False]
    assert found(uploads.folder.parent) == [4]
    digest = digest_of(content_of(KEYS[0]))
    assert again.count_received(KEYS[0], digest) == len(content_of(KEYS[0])), "its report may be repeated"
    assert again.complete(KEYS[0], digest) == spool_path_of(again.folder, KEYS[0], digest)
    assert again.persist(KEYS[0], digest) == len(content_of(KEYS[0]))
    again.expect([KEYS[3]])
    await store(again, KEYS[3])
    assert found(uploads.folder.parent) == [1, 4] or found(uploads.folder.parent) == [4, 1]
    end(again, *KEYS[:2], KEYS[3])
    await again.close()
    assert (found(uploads.folder.parent), list(again.folder.iterdir())) == ([], [])


@pytest.mark.fault("F2")
async def test_what_is_torn_or_damaged_is_not_taken_for_an_update(uploads: Spool) -> None:
    await store(uploads, *KEYS)
    (path,) = list_segments(uploads.folder.parent / "segments")
    second, last = list(read_records(path))[1], list(read_records(path))[-1]
    with path.open("r+b") as file:
        file.seek(second.part.start + 5)
        file.write(b"?")
        file.truncate(last.part.start + 9)
    again = open_spool(uploads.folder.parent)
    await asyncio.to_thread(again.keep, KEYS, KNOWN)
    assert stored(again, KEYS) == [True, False, True, False]
    assert again.locate(KEYS[1], digest_of(content_of(KEYS[1]))) is None


async def test_a_record_is_preferred_to_a_torn_copy_of_it(uploads: Spool) -> None:
    await store(uploads, KEYS[0])
    digest = digest_of(content_of(KEYS[0]))
    uploads.hand_over()
    path = spool_path_of(uploads.folder, KEYS[0], digest)
    assert path.read_bytes() == content_of(KEYS[0])
    path.write_bytes(b"torn")
    again = open_spool(uploads.folder.parent)
    await asyncio.to_thread(again.keep, KEYS[:1], KNOWN)
    assert stored(again, KEYS[:1]) == [True]
    assert again.complete(KEYS[0], digest) == path
    assert path.read_bytes() == content_of(KEYS[0])


async def test_records_of_attempts_that_the_database_does_not_know_are_set_aside(uploads: Spool) -> None:
    """An older backup of the database was restored: the newer one may be put back."""
    await store(uploads, KEYS[0])
    again = open_spool(uploads.folder.parent)
    await asyncio.to_thread(again.keep, [], ())
    assert found(uploads.folder.parent) == []
    (aside,) = (uploads.folder.parent / "segments" / files.SET_ASIDE_FOLDER).iterdir()
    assert [record.part.size_bytes for record in read_records(aside)] == [len(content_of(KEYS[0]))]


async def test_an_assignment_that_ends_during_the_sync_leaves_no_record(
    uploads: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its segment stays meanwhile: its descriptor must not become that of another file."""
    digest, real = receive(uploads, KEYS[0]), os.fdatasync

    def end_and_sync(descriptor: int) -> None:
        end(uploads, KEYS[0])
        real(descriptor)

    monkeypatch.setattr(files, "_fallocate", None)  # so that it is not emptied, but removed
    monkeypatch.setattr(os, "fdatasync", end_and_sync)
    await uploads.store(KEYS[0], digest)
    assert found(uploads.folder.parent) == []


async def test_an_update_that_was_removed_fails_alone(uploads: Spool) -> None:
    digests = [receive(uploads, key) for key in KEYS[:2]]
    storing = [asyncio.create_task(uploads.store(*each)) for each in zip(KEYS, digests, strict=False)]
    await asyncio.sleep(0)
    uploads.discard(KEYS[0])
    failed, other = await asyncio.gather(*storing, return_exceptions=True)
    assert (type(failed), other) == (UploadError, None)
    assert stored(uploads, KEYS[:2]) == [False, True]


async def test_a_caller_that_is_gone_stops_no_other(uploads: Spool) -> None:
    digests = [receive(uploads, key) for key in KEYS[:2]]
    gone, other = [asyncio.create_task(uploads.store(*each)) for each in zip(KEYS, digests, strict=False)]
    await asyncio.sleep(0)
    gone.cancel()
    await other
    with contextlib.suppress(asyncio.CancelledError):
        await gone
    assert stored(uploads, KEYS[:2]) == [True, True]


async def test_an_update_is_replaced_by_that_of_a_restarted_client(uploads: Spool) -> None:
    content = content_of(KEYS[0])
    upload = uploads.open(KEYS[0], digest_of(content), len(content), 0)
    upload.write(content[:7])
    upload = uploads.open(KEYS[0], digest_of(b"other"), 5, 0)
    upload.write(b"other")
    upload.close()
    assert uploads.complete(KEYS[0], digest_of(b"other")) is not None
    await uploads.store(KEYS[0], digest_of(b"other"))
    assert found(uploads.folder.parent) == [1]
