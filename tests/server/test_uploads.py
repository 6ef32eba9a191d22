"""Uploads resume where they stopped, and are complete when their bytes have the promised digest."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat_server.errors import BlobFullError, UploadError
from fedplat_server.storage.spool import Spool
from fedplat_server.storage.spool_file import name_attempt

DATA = bytes(range(256)) * 40
SIZE = len(DATA)
DIGEST = hashlib.sha256(DATA).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
KEY = AssignmentId(AttemptKey("job", 1, 2), "client")


def reopen(folder: Path, *needed: AssignmentId) -> Spool:
    """A spool that expects some updates."""
    spool = Spool(folder)
    spool.expect(needed or [KEY])
    return spool


@pytest.fixture
def uploads(tmp_path: Path) -> Spool:
    return reopen(tmp_path / "uploads")


def num_files(uploads: Spool) -> int:
    return sum(path.is_file() for path in uploads.folder.rglob("*"))


def fill(uploads: Spool, key: AssignmentId = KEY) -> None:
    upload = uploads.open(key, DIGEST, SIZE, 0)
    upload.write(DATA)
    upload.close()


def test_an_upload_in_parts(uploads: Spool) -> None:
    assert uploads.count_received(KEY, DIGEST) == 0
    upload = uploads.open(KEY, DIGEST, SIZE, 0)
    for start in range(0, SIZE, 1000):
        upload.write(memoryview(DATA)[start : start + 1000])
        assert upload.received == uploads.count_received(KEY, DIGEST) == min(start + 1000, SIZE)
    assert upload.finish().read_bytes() == DATA
    path = uploads.complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA


def test_it_is_complete_without_being_finished(uploads: Spool) -> None:
    fill(uploads)
    path = uploads.complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA


@pytest.mark.fault("F14")
def test_it_resumes_where_it_stopped(uploads: Spool) -> None:
    upload = uploads.open(KEY, DIGEST, SIZE, 0)
    upload.write(DATA[:100])
    upload.close()
    upload.close()
    assert uploads.complete(KEY, DIGEST) is None
    assert uploads.count_received(KEY, DIGEST) == 100
    upload = uploads.open(KEY, DIGEST, SIZE, 100)
    upload.write(DATA[100:])
    assert upload.finish().read_bytes() == DATA


def test_it_resumes_after_a_restart(uploads: Spool) -> None:
    upload = uploads.open(KEY, DIGEST, SIZE, 0)
    upload.write(DATA[:100])
    upload.close()
    again = reopen(uploads.folder)
    assert again.count_received(KEY, DIGEST) == 100
    upload = again.open(KEY, DIGEST, SIZE, 100)
    upload.write(DATA[100:])
    assert upload.finish().read_bytes() == DATA
    assert reopen(uploads.folder).complete(KEY, DIGEST) is not None


@pytest.mark.parametrize("offset", [0, 99, 101, SIZE])
@pytest.mark.fault("F14")
def test_it_resumes_nowhere_else(uploads: Spool, offset: int) -> None:
    upload = uploads.open(KEY, DIGEST, SIZE, 0)
    upload.write(DATA[:100])
    upload.close()
    with pytest.raises(UploadError, match="resume at 100"):
        uploads.open(KEY, DIGEST, SIZE, offset)
    assert uploads.count_received(KEY, DIGEST) == 100


def test_other_bytes_start_again(uploads: Spool) -> None:
    upload = uploads.open(KEY, OTHER, SIZE, 0)
    upload.write(b"xyz")
    upload.close()
    assert uploads.count_received(KEY, DIGEST) == 0
    with pytest.raises(UploadError, match="resume at 0"):
        uploads.open(KEY, DIGEST, SIZE, 3)
    fill(uploads)
    assert uploads.complete(KEY, DIGEST) is not None
    assert uploads.complete(KEY, OTHER) is None
    assert num_files(uploads) == 1


def test_what_was_taken_as_complete_cannot_be_replaced(uploads: Spool) -> None:
    fill(uploads)
    path = uploads.complete(KEY, DIGEST)
    assert path is not None
    with pytest.raises(UploadError, match="reported for this assignment already"):
        uploads.open(KEY, OTHER, 5, 0)
    assert path.read_bytes() == DATA
    uploads.open(KEY, DIGEST, SIZE, SIZE).finish()  # asked again, because a reply was lost
    uploads.discard(KEY)
    uploads.open(KEY, OTHER, 5, 0).close()


@pytest.mark.fault("F13")
def test_nothing_is_added_to_what_was_taken_as_complete(uploads: Spool) -> None:
    upload = uploads.open(KEY, DIGEST, SIZE + 1, 0)
    upload.write(DATA)
    path = uploads.complete(KEY, DIGEST)
    with pytest.raises(UploadError, match="has ended, or another call continues it"):
        upload.write(b"x")
    assert path is not None
    assert path.read_bytes() == DATA


def test_more_bytes_than_were_declared_are_refused(uploads: Spool) -> None:
    upload = uploads.open(KEY, DIGEST, 100, 0)
    upload.write(DATA[:60])
    with pytest.raises(UploadError, match="more bytes than the declared 100"):
        upload.write(DATA[60:101])
    assert uploads.count_received(KEY, DIGEST) == 60
    upload.close()


@pytest.mark.parametrize("digest", ["", "../" * 30, "A" * 64])
def test_only_digests_are_accepted(uploads: Spool, digest: str) -> None:
    with pytest.raises(UploadError, match="not a digest"):
        uploads.open(KEY, digest, 1, 0)
    assert uploads.count_received(KEY, digest) == 0
    assert uploads.complete(KEY, digest) is None


def test_ids_are_no_paths(uploads: Spool) -> None:
    odd = AssignmentId(AttemptKey("../../job", 1, 1), "/etc/../\N{SNOWMAN}\x00")
    uploads.expect([odd])
    fill(uploads, odd)
    assert num_files(uploads) == 1


def test_too_few_bytes_are_not_finished(uploads: Spool) -> None:
    upload = uploads.open(KEY, DIGEST, SIZE, 0)
    upload.write(DATA[:-1])
    with pytest.raises(UploadError, match=f"{SIZE - 1} of {SIZE} bytes"):
        upload.finish()
    assert uploads.count_received(KEY, DIGEST) == SIZE - 1


@pytest.mark.fault("F14")
def test_bytes_with_another_digest_start_again(uploads: Spool) -> None:
    upload = uploads.open(KEY, OTHER, SIZE, 0)
    upload.write(DATA)
    assert uploads.complete(KEY, OTHER) is None
    with pytest.raises(UploadError, match="resume at 0"):
        upload.finish()
    assert uploads.count_received(KEY, OTHER) == 0
    upload = uploads.open(KEY, OTHER, 5, 0)
    upload.write(b"other")
    assert upload.finish().read_bytes() == b"other"


def test_a_second_writer_fences_the_first(uploads: Spool) -> None:
    first = uploads.open(KEY, DIGEST, SIZE, 0)
    first.write(DATA[:100])
    second = uploads.open(KEY, DIGEST, SIZE, 100)
    with pytest.raises(UploadError, match="another call continues it"):
        first.write(DATA[100:])
    first.close()
    second.write(DATA[100:])
    assert first.received == 100
    assert second.finish().read_bytes() == DATA


def test_one_of_many_writers_in_threads_wins(uploads: Spool) -> None:
    """Whatever the order, the bytes stay in order, because each byte is written by who holds the place."""

    def send(_: int) -> None:
        while uploads.complete(KEY, DIGEST) is None:
            with contextlib.suppress(UploadError):
                offset = uploads.count_received(KEY, DIGEST)
                upload = uploads.open(KEY, DIGEST, SIZE, offset)
                for start in range(offset, SIZE, 512):
                    upload.write(DATA[start : start + 512])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    path = uploads.complete(KEY, DIGEST)
    assert path is not None
    assert path.read_bytes() == DATA


def test_clients_do_not_meet(uploads: Spool) -> None:
    attempt = KEY.attempt
    others = [KEY._replace(attempt=each) for each in (attempt._replace(number=3), attempt._replace(job_id="other"))]
    keys = [KEY, KEY._replace(client_id="b"), *others]
    uploads.expect(keys)
    for key in keys:
        fill(uploads, key)
    for key in (*keys[:2], keys[0]):
        uploads.discard(key)
    assert [uploads.complete(key, DIGEST) is not None for key in keys] == [False, False, True, True]
    uploads.discard(keys[2])
    assert num_files(uploads) == 1
    uploads.keep([], {name_attempt(each.attempt) for each in keys})
    assert num_files(uploads) == 0
    fill(uploads)


def test_a_discarded_upload_is_fenced(uploads: Spool) -> None:
    upload = uploads.open(KEY, DIGEST, SIZE, 0)
    uploads.discard(KEY)
    with pytest.raises(UploadError):
        upload.write(DATA)
    assert num_files(uploads) == 0


@pytest.mark.fault("F7")
def test_a_full_disk_keeps_what_was_received(uploads: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = uploads.open(KEY, DIGEST, SIZE, 0)
    upload.write(DATA[:100])
    write, calls = os.write, list[int]()

    def full(descriptor: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(BlobFullError):
            upload.write(DATA[100:200])
    assert len(calls) == 2
    assert uploads.count_received(KEY, DIGEST) == 100
    upload.write(DATA[100:])
    assert upload.finish().read_bytes() == DATA


@pytest.mark.fault("F22")
def test_memory_does_not_grow_with_the_upload(uploads: Spool) -> None:
    chunk, digest = bytes(1 << 20), hashlib.sha256(bytes(64 << 20)).hexdigest()
    upload = uploads.open(KEY, digest, 64 << 20, 0)
    tracemalloc.start()
    try:
        for _ in range(64):
            upload.write(chunk)
        upload.finish()
        again = reopen(uploads.folder)
        assert again.count_received(KEY, digest) == 64 << 20
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20
