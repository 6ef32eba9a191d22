"""The row of a small model that one job gives up while another commits the same bytes, on a real PostgreSQL.

Each test keeps one of both transactions open where a fault of its locks would lose the row: the other one then either
waits for it, or has ended without it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Collection

import asyncpg
import pytest
from msgspec import structs
from sqlalchemy import Connection
from sqlalchemy.util import await_only

from fedplat.rounds.events import AttemptAggregated, JobAction, UpdateReported
from fedplat_server import crash_points
from fedplat_server.database import sql_contents
from fedplat_server.database.records import RetainedVersions
from fedplat_server.database.sql_contents import SmallContents
from fedplat_server.database.store import Store, open_store
from support.polling import PATIENCE_S
from support.store.driver import JOB_FILE, Driver, digest_of

MODEL = b"a small model"
DIGEST = hashlib.sha256(MODEL).hexdigest()
FILE = JOB_FILE.partition("[evaluation")[0]
KEPT = RetainedVersions(models_from=2, every=0, states_from=0)
BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@pytest.fixture
async def store(postgres: str) -> AsyncGenerator[Store]:
    opened = await open_store(postgres)
    yield opened
    await opened.close()


class Stop:
    """A place where a transaction stops, once it is armed."""

    def __init__(self) -> None:
        self.reached, self.goes_on = asyncio.Event(), asyncio.Event()

    def __call__(self) -> None:
        self.reached.set()
        await_only(self.goes_on.wait())


async def prepared(store: Store) -> Driver:
    """A job whose first version is spare and has the model as a row, and another one that is about to commit it."""
    driver = Driver(store, check=False)
    await driver.create("one", FILE)
    await report(driver, "one")
    await commit(driver, "one")
    await driver.finish_attempt("one", "later-")
    await driver.operate("one", JobAction.PAUSE)
    await driver.create("two", FILE)
    await report(driver, "two")
    return driver


async def report(driver: Driver, job_id: str) -> None:
    await driver.check_in(*(f"{job_id}-{number}" for number in range(5)))
    key, cohort = driver.cohort(job_id)
    for name in cohort[:3]:
        await driver.send(UpdateReported(key, name, digest_of("update", name), 4.0, {}, 2**20))


async def commit(driver: Driver, job_id: str) -> None:
    """Commit the open attempt with the model."""
    attempt = driver.coordinator.jobs[job_id].open_attempt
    assert attempt is not None
    version = structs.replace(driver.next_version(job_id), digest=DIGEST)
    proposal = driver.propose(AttemptAggregated(attempt.key, version))
    await driver.store.jobs.save(proposal.changes, driver.now, contents=SmallContents(blobs={DIGEST: MODEL}))
    driver.coordinator.accept(proposal)


async def give_up(store: Store) -> frozenset[str]:
    return await store.retention.mark_removed("one", await store.retention.list_removable("one", KEPT))


async def until_blocked(postgres: str, task: asyncio.Task[object]) -> None:
    """Waits until a transaction waits for another one's lock, or its task is over."""
    connection = await asyncpg.connect(postgres)
    try:
        for _ in range(int(PATIENCE_S / 0.05)):
            if task.done() or await connection.fetchval(BLOCKED):
                return
            await asyncio.wait([task], timeout=0.05)
        raise AssertionError("gave up waiting for a lock")
    finally:
        await connection.close()


async def test_a_row_that_is_about_to_be_committed_again_is_kept(
    store: Store, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, stop = await prepared(store), Stop()

    def point(name: str) -> None:
        if name == "rows.uncommitted":
            stop()

    monkeypatch.setattr(crash_points, "point", point)
    committing = asyncio.create_task(commit(driver, "two"))
    await stop.reached.wait()
    pruning = asyncio.create_task(give_up(store))
    await until_blocked(postgres, pruning)
    stop.goes_on.set()
    await committing
    assert DIGEST not in await pruning
    assert await store.contents.load_blobs([DIGEST]) == {DIGEST: MODEL}


async def test_a_row_that_was_just_removed_is_added_again(
    store: Store, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, stop = await prepared(store), Stop()
    remove: Callable[[Connection, Collection[str]], None] = sql_contents.delete_blobs

    def remove_and_stop(connection: Connection, digests: Collection[str]) -> None:
        remove(connection, digests)
        stop()

    monkeypatch.setattr(sql_contents, "delete_blobs", remove_and_stop)
    pruning = asyncio.create_task(give_up(store))
    await stop.reached.wait()
    committing = asyncio.create_task(commit(driver, "two"))
    await until_blocked(postgres, committing)
    stop.goes_on.set()
    assert DIGEST in await pruning
    await committing
    assert await store.contents.load_blobs([DIGEST]) == {DIGEST: MODEL}
