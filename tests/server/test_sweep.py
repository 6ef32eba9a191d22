"""What a sweep removes of the blobs, and what it leaves alone; and what is left of a file that was removed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fedplat.job import Retention, parse_job
from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.states import JobStatus
from fedplat_server.aggregation import backend
from fedplat_server.coordination.retention import find_retained_versions
from fedplat_server.database.records import RetainedVersions
from fedplat_server.storage import blob_folder as blob_files
from fedplat_server.storage.blobs import BlobStore
from support.jobs import job_file
from support.private_jobs import private


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_a_blob_that_is_not_named_yet_is_left_alone(blobs: BlobStore) -> None:
    """It was written a moment ago, and the database is about to name it."""
    blob = blobs.put_chunks([b"model"])
    with blobs.sweep() as sweep:
        assert sweep.remove([blob.digest]) == 0
    assert blobs.exists(blob.digest)
    blobs.settle([blob.digest])
    with blobs.sweep() as sweep:
        assert sweep.remove([blob.digest]) == len(b"model")
    assert not blobs.exists(blob.digest)
    assert list(blobs.folder.glob("*.tmp")) == []


def test_a_blob_that_is_written_again_during_a_sweep_is_left_alone(blobs: BlobStore) -> None:
    """Also when it was settled meanwhile: what the sweep was told of the database is older than that."""
    digest = blobs.put_chunks([b"model"]).digest
    blobs.settle([digest])
    with blobs.sweep() as sweep:
        blobs.put_chunks([b"model"])
        blobs.settle([digest])
        sweep.remove([digest])
    assert blobs.exists(digest)


def test_a_blob_that_is_held_or_young_is_left_alone(blobs: BlobStore) -> None:
    digest = blobs.put_chunks([b"model"]).digest
    blobs.settle([digest])
    with blobs.protect(digest), blobs.sweep() as sweep:
        sweep.remove([digest])
    with blobs.sweep() as sweep:
        sweep.remove([digest], older_than_s=3600.0)
    assert blobs.exists(digest)


def test_a_sweep_goes_on_after_a_blob_that_is_gone(blobs: BlobStore) -> None:
    digests = sorted(blobs.put_chunks([bytes([number])]).digest for number in range(3))
    blobs.settle(digests)
    blobs.delete(digests[0])
    with blobs.sweep() as sweep:
        assert sweep.remove(digests) == 2
    assert blobs.all_digests() == frozenset()


def test_a_recorder_knows_what_was_written_by_it(blobs: BlobStore) -> None:
    recorder = blobs.recorder()
    other, mine = blobs.put_chunks([b"other"]), recorder.put_chunks([b"mine"])
    assert recorder.made == [mine.digest] != [other.digest]
    with blobs.sweep() as sweep:  # one lock and one memory for both
        assert sweep.remove([mine.digest, other.digest]) == 0


def test_the_beginning_of_a_file_is_overwritten(tmp_path: Path) -> None:
    """Seen by a reader that holds the file open; a second name, as backups have, keeps the content."""
    path, linked = tmp_path / "state", tmp_path / "linked"
    content = b"seed" * blob_files.ERASED_BYTES
    for target in (path, linked):
        target.write_bytes(content)
    os.link(linked, tmp_path / "backup")
    with path.open("rb") as file:
        blob_files.erase(path)
        left = file.read()
    assert left[: blob_files.ERASED_BYTES] == bytes(blob_files.ERASED_BYTES)
    assert left[blob_files.ERASED_BYTES :] == content[blob_files.ERASED_BYTES :]
    blob_files.erase(linked)
    blob_files.erase(linked)  # it is gone already
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backup"]
    assert (tmp_path / "backup").read_bytes() == content


async def test_work_in_a_thread_is_waited_for_when_its_task_is_cancelled() -> None:
    """Else its files would come after everything was tidied up."""
    loop, begun, may_end, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event(), list[bool]()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result()
        ended.append(True)

    task = asyncio.create_task(backend.run_to_the_end(work))
    await begun.wait()
    task.cancel()
    loop.call_soon(may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        (job_file(), JobStatus.RUNNING, RetainedVersions(0, 0, 8)),
        (job_file(), JobStatus.COMPLETED, RetainedVersions(0, 0, 8)),
        (
            job_file(more="[retention]\nversions = 3\nevery = 4\nstates = 5\n"),
            JobStatus.RUNNING,
            RetainedVersions(7, 4, 5),
        ),
        (job_file(more="[retention]\nversions = 30\nstates = 40\n"), JobStatus.RUNNING, RetainedVersions(0, 0, 0)),
        (private(), JobStatus.RUNNING, RetainedVersions(0, 0, 9)),
        (private(), JobStatus.FAILED, RetainedVersions(0, 0, 10)),
    ],
)
def test_what_a_job_keeps(text: str, status: JobStatus, expected: RetainedVersions) -> None:
    job = JobState("j", parse_job(text), ModelVersion(9, 9, 1, "d", 1), status=status)
    assert find_retained_versions(job) == expected


def test_milestones_need_a_number_of_versions() -> None:
    with pytest.raises(ValueError, match="every = 5: expected versions with it"):
        Retention(every=5)
