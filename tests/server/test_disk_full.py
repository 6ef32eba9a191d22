"""The disk is full: callers are told when to come back, nothing is torn, and work continues once there is room."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat import durable, wire
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from fedplat_server.instruments import note_full
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, update_of
from support.jobs import job_file

pytestmark = pytest.mark.fault("F7")
MODEL = Parameters.from_arrays({"weight": np.zeros(10_000, np.float32)})
UPDATE = update_of(MODEL, 0)


async def is_full(call: object) -> None:
    """The call is refused because storage is full, with a retry window."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, caught.value.details()
    trailers = dict(caught.value.trailing_metadata() or ())
    assert trailers["fedplat-code"] == "STORAGE_FULL"
    earliest, latest = map(float, str(trailers[wire.METADATA_RETRY]).split())
    assert 0.0 < earliest < latest


async def num_full(site: Site) -> int:
    return (await site.operator.operators.GetStatus(admin_pb2.GetStatusRequest())).num_storage_full


class Disk:
    """A disk with room for everything, or for `room` more bytes."""

    def __init__(self) -> None:
        self.room: int | None = None
        self._write, self._write_at = os.write, os.pwrite

    def write_all(self, descriptor: int, data: durable.Bytes) -> None:
        self._write_what_fits(data, lambda part: self._write(descriptor, part))

    def write_at(self, descriptor: int, data: durable.Bytes, position: int) -> None:
        self._write_what_fits(data, lambda part: self._write_at(descriptor, part, position))

    def _write_what_fits(self, data: durable.Bytes, write: Callable[[memoryview], int]) -> None:
        rest = memoryview(data).cast("B")
        fits = len(rest) if self.room is None else min(len(rest), self.room)
        write(rest[:fits])
        if self.room is not None:
            self.room -= fits
        if fits < len(rest):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(durable, "write_all", made.write_all)
    monkeypatch.setattr(durable, "write_at", made.write_at)
    return made


async def working(site: Site, model: Parameters) -> tuple[str, RawClient, str]:
    job = await site.operator.start(job_file(goal=1), model)
    client = await site.enroll()
    return job, client, (await client.assignment()).token


async def test_an_upload_continues_when_there_is_room_again(site: Site, disk: Disk) -> None:
    job, client, token = await working(site, initial_model())
    content = update_of(initial_model(), 0).to_bytes()
    assert await num_full(site) == 0
    disk.room = 120
    await is_full(client.upload(token, content))
    await is_full(client.report_inline(token, content))
    assert await num_full(site) == 2
    disk.room = None
    have = await client.query(token, digest_of(content))
    assert 0 <= have <= 120
    await client.upload(token, content, offset=have)
    assert (await client.report(token, digest_of(content))).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")


async def test_a_model_that_finds_no_room_is_no_model(site: Site, disk: Disk) -> None:
    disk.room = 10
    await is_full(site.operator.upload(initial_model()))
    disk.room = None
    assert not list((site.folder / "blobs").rglob("*.tmp"))
    assert await site.operator.upload(initial_model()) == digest_of(initial_model().to_bytes())


async def test_a_version_that_finds_no_room_is_tried_again(
    site: Site, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the update, but not for the new model."""
    job, client, token = await working(site, initial_model())
    update = update_of(initial_model(), 0)
    await client.upload(token, update.to_bytes())
    disk.room = 0
    await client.report(token, digest_of(update.to_bytes()))
    await site.operator.until(job, "attempt", "ABANDONED")
    shown = await site.operator.show(job)
    assert (shown.model.version, "No space left" in shown.reason) == (0, True)
    disk.room = None
    await client.deliver((await client.assignment()).token, update)
    await site.operator.until(job, "job", "COMPLETED")
    blobs = {path.name for path in (site.folder / "blobs").rglob("*") if path.is_file()}
    assert {version.model.digest for version in await site.operator.versions(job)} <= blobs
    assert not [name for name in blobs if name.endswith(".tmp")]


async def test_a_daemon_counts_full_writes_since_its_start(folder: Path) -> None:
    note_full("models")
    async with daemons.running(folder) as site:
        for expected in (0, 1):
            status = await site.operator.operators.GetStatus(admin_pb2.GetStatusRequest())
            is_raised = "storage_full" in [alert.name for alert in status.alerts]
            assert (status.num_storage_full, is_raised) == (expected, expected == 1)
            note_full("updates")


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Generator[None]:
    """A small, but real, file system."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small file system; the tests above made the same errors by themselves")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fills the disk; returns the file that does so."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return path


async def test_a_real_disk(tmp_path: Path, empty_database: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with small_disk(folder, 32):
        shutil.copy(empty_database, folder / "fedplat.sqlite")
        async with daemons.running(folder) as site:
            job, client, token = await working(site, MODEL)
            filler = fill(folder)
            await is_full(client.upload(token, UPDATE.to_bytes()))
            await is_full(site.operator.upload(UPDATE))
            await is_full(_enrol_many(site))
            assert await num_full(site) >= 3
            filler.unlink()
            await site.enroll()
            have = await client.query(token, digest_of(UPDATE.to_bytes()))
            await client.upload(token, UPDATE.to_bytes(), offset=have)
            assert (await client.report(token, digest_of(UPDATE.to_bytes()))).HasField("receipt")
            await site.operator.until(job, "job", "COMPLETED")
            assert (await site.operator.model(job)).to_vector().tobytes() == UPDATE.to_vector().tobytes()


async def _enrol_many(site: Site) -> None:
    """Enrolls many clients, since the database may have some room left in its files."""
    for _ in range(1000):
        await site.enroll()
