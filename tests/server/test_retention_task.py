"""The background task that removes what jobs do not keep: when it looks, what it tries again, and how it ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from fedplat.job.sections import Retention
from fedplat.rounds import JobState, ModelVersion
from fedplat.rounds.states import JobStatus
from fedplat_server import retries
from fedplat_server.coordination import retention
from fedplat_server.coordination.retention import MIN_VERSIONS, RetentionTask, find_retained_versions
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import BlobError, LeadershipLostError, StoreUnavailableError
from fedplat_server.storage.blobs import BlobStore, Sweep
from support import daemons, databases
from support.daemons import Gate
from support.faulty_store import FaultyStore
from support.runner_bench import settle
from support.store.driver import JOB_FILE, Driver, digest_of, run_to_the_end

LATEST = ModelVersion(version=30, round=30, attempt=1, digest="d", size_bytes=1)
FORGETFUL = JOB_FILE + "\n[retention]\nversions = 1\nstates = 1\nhistory_days = 1e-9\n"


class Bench:
    """A task on a store that fails on command, and a job that has ended with version 3."""

    def __init__(self, store: FaultyStore, blobs: BlobStore, driver: Driver) -> None:
        self.store = store
        self.blobs = blobs
        self.driver = driver
        self.seen: dict[str, float] = {}
        self.task = RetentionTask(blobs, cast(Store, store), self.state_of, self.drain)

    def state_of(self, job_id: str) -> JobState:
        return self.driver.coordinator.jobs[job_id]

    def drain(self) -> Mapping[str, float]:
        seen, self.seen = self.seen, {}
        return seen

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        async def holds() -> bool:
            return condition()

        await daemons.until(holds, what)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Bench]:
    monkeypatch.setattr(retries, "BACKGROUND_RETRY_S", 0.0)
    store = await open_store(databases.create_sqlite(tmp_path / "fedplat.sqlite"))
    driver = Driver(store, check=False)
    await driver.create("one", FORGETFUL)
    await run_to_the_end(driver, "one", "c")
    made = Bench(FaultyStore(store), BlobStore(tmp_path / "blobs"), driver)
    yield made
    await made.task.close()
    await store.close()


async def test_a_running_job_keeps_few_versions_while_the_disk_is_nearly_full(bench: Bench) -> None:
    await bench.driver.create("two", JOB_FILE)
    job = structs.replace(bench.state_of("two"), status=JobStatus.RUNNING, latest=LATEST)
    assert find_retained_versions(job).models_from == 0
    assert find_retained_versions(job, is_low=True).models_from == 30 + 1 - MIN_VERSIONS
    ended = structs.replace(job, status=JobStatus.COMPLETED)
    assert find_retained_versions(ended, is_low=True).models_from == 0
    own = structs.replace(job, spec=structs.replace(job.spec, retention=Retention(versions=20)))
    assert find_retained_versions(own, is_low=True).models_from == 30 + 1 - 20


def failing_once(error: Exception) -> Callable[[], Awaitable[None]]:
    left = [error]

    async def fail() -> None:
        if left:
            raise left.pop()

    return fail


async def test_the_end_waits_for_the_removal_in_progress_and_begins_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 1)  # as if there was always more to remove
    gate = bench.store.before["mark_removed"] = Gate()
    bench.task.begin()
    bench.task.schedule_job("one")
    bench.task.schedule_blobs(["f" * 64])
    await gate.reached.wait()
    closing = asyncio.create_task(bench.task.close())
    await settle()
    assert not closing.done()
    searches = bench.store.calls["list_removable"]
    gate.open()
    await closing
    assert bench.store.calls["list_removable"] == searches
    assert bench.store.calls["find_unreferenced"] == 0
    assert (await bench.store.inner.jobs.list_versions("one"))[1].model_removed_unix_s is not None


@pytest.mark.parametrize("method", ["list_removable", "mark_removed", "find_unreferenced"])
async def test_what_an_outage_interrupts_is_tried_again(bench: Bench, method: str) -> None:
    digest = bench.blobs.put_chunks([b"of an attempt without a version"]).digest
    bench.blobs.settle([digest])
    bench.store.before[method] = failing_once(StoreUnavailableError("away, says the test"))
    bench.task.begin()
    bench.task.schedule_job("one")
    bench.task.schedule_blobs([digest])
    await bench.until(lambda: not bench.blobs.exists(digest) and bench.store.calls[method] > 1, "the second attempt")
    versions = await bench.store.inner.jobs.list_versions("one")
    assert [one.model_removed_unix_s is None for one in versions] == [True, False, False, True]
    assert await bench.store.inner.retention.list_old_attempts("one", 1e12) == []


@pytest.mark.parametrize("cause", ["a lost answer", "the disk"])
async def test_files_whose_removal_failed_are_removed_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """The rows are stored, and the versions never found again: a private job's seeds would stay beside its models."""
    digests = [bench.blobs.put_chunks([repr(parts).encode()]).digest for parts in (("one", 1), ("one", "state", 1))]
    assert digests == [digest_of("one", 1), digest_of("one", "state", 1)]
    bench.blobs.settle(digests)
    if cause == "the disk":
        remove, left = Sweep.remove, [BlobError("the disk refuses, says the test")]

        def refuse(*args: Any, **keywords: Any) -> int:
            if left:
                raise left.pop()
            return remove(*args, **keywords)

        monkeypatch.setattr(Sweep, "remove", refuse)
        monkeypatch.setattr(retention, "INTERVAL_S", 0.0)
    else:
        bench.store.after["mark_removed"] = failing_once(StoreUnavailableError("lost, says the test"))
    bench.task.begin()
    bench.task.schedule_job("one")
    await bench.until(lambda: not any(map(bench.blobs.exists, digests)), "both files to be removed")


async def test_an_outage_is_not_asked_again_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BACKGROUND_RETRY_S", 3600.0)
    monkeypatch.setattr(retention, "CLOSE_S", 0.01)
    bench.store.outage = True
    bench.task.begin()
    bench.task.schedule_job("one")
    await bench.until(lambda: bench.store.calls["list_old_attempts"] > 0, "the search")
    await settle()
    assert bench.store.calls["list_old_attempts"] == 1


async def test_a_daemon_that_no_longer_leads_removes_nothing_more(bench: Bench) -> None:
    bench.store.before["mark_removed"] = failing_once(LeadershipLostError("another daemon leads"))
    bench.task.begin()
    bench.task.schedule_job("one")
    await bench.until(lambda: bench.store.calls["mark_removed"] == 1, "the removal")
    await settle()
    bench.task.schedule_job("one")
    await settle()
    assert bench.store.calls["mark_removed"] == 1


async def test_the_search_finds_what_was_not_scheduled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orphans of `prune` that are old enough, old events, and history that becomes old without an event."""
    old, young = (bench.blobs.put_chunks([content]).digest for content in (b"old", b"young"))
    bench.blobs.settle([old, young])
    two_hours_ago = time.time() - 7200.0
    os.utime(bench.blobs.path(old), (two_hours_ago, two_hours_ago))
    bench.task.begin()
    bench.task.schedule_job("one")
    await bench.until(lambda: bench.store.calls["mark_removed"] == 1, "the first removal")
    first = bench.store.calls["list_old_attempts"]
    bench.seen = {"c-0": 5.0}
    monkeypatch.setattr(retention, "INTERVAL_S", 0.0)
    monkeypatch.setattr(retention, "LAST_SEEN_INTERVAL_S", 0.0)
    bench.task.schedule_blobs([])
    calls = bench.store.calls
    await bench.until(lambda: calls["list_old_attempts"] > first + 1 and calls["record_seen"] > 0, "two searches")
    monkeypatch.setattr(retention, "INTERVAL_S", 600.0)
    assert (bench.blobs.exists(old), bench.blobs.exists(young)) == (False, True)
    assert min(calls[name] for name in ("remove_events", "limit_pending", "remove_availability")) > 0
