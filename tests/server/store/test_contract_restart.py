"""What every store keeps for a server that is started again: deadlines, the order of reports, the last save."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from fedplat.rounds import Attempt
from fedplat.rounds.events import JobAction, OperatorCommand, UpdateReported, UploadStarted
from fedplat_server.database import tables
from fedplat_server.database.engine import WRITES, async_url, create_engine
from fedplat_server.database.store import Store, open_store
from fedplat_server.errors import StaleRevisionError
from support.store.driver import NOW, Driver, digest_of


class WallClock:
    def __init__(self) -> None:
        self.unix_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.unix_s


@pytest.fixture
def wall() -> WallClock:
    return WallClock()


@pytest.fixture
async def timed(database: str, wall: WallClock) -> AsyncGenerator[Store]:
    """A store in each kind of database, on a wall clock that the test sets."""
    store = await open_store(database, wall)
    yield store
    await store.close()


async def attempt_of(store: Store, now: float) -> Attempt:
    (record,) = await store.jobs.load_jobs(now)
    assert record.state.attempt is not None
    return record.state.attempt


async def collecting(store: Store) -> Driver:
    driver = Driver(store)
    await driver.create("one")
    await driver.check_in(*"abcde")
    return driver


async def test_deadlines_come_back_on_the_clock_of_the_new_process(timed: Store, wall: WallClock) -> None:
    driver = await collecting(timed)
    key, _ = driver.cohort("one")
    wall.unix_s += 30.0
    driver.now += 30.0
    await driver.send(UploadStarted(key, "a"))
    wall.unix_s += 7.0
    attempt = await attempt_of(timed, 5.0)
    a, b = attempt.assignments["a"], attempt.assignments["b"]
    assert (a.assigned_at, a.deadline_at) == pytest.approx((5.0 - 37.0, 5.0 + 50.0 - 7.0), abs=1e-5)
    assert (b.assigned_at, b.deadline_at) == pytest.approx((5.0 - 37.0, 5.0 + 100.0 - 37.0), abs=1e-5)
    assert attempt.next_deadline == a.deadline_at
    assert (attempt.opened_at, attempt.selection_ends_at) == (0.0, 0.0)


@pytest.mark.fault("F18")
async def test_a_wall_clock_that_jumps_is_noticed_only_by_a_restart(timed: Store, wall: WallClock) -> None:
    """A running server keeps its own clock: a deadline that is saved after a jump is as far away as before."""
    driver = await collecting(timed)
    key, _ = driver.cohort("one")
    wall.unix_s += 86_400.0
    await driver.send(UploadStarted(key, "a"))
    attempt = await attempt_of(timed, driver.now)
    assert attempt.assignments["a"].deadline_at == pytest.approx(driver.now + 50.0, abs=1e-5)
    live = driver.coordinator.find(key, "a")
    assert live is not None
    assert live.deadline_at == driver.now + 50.0


async def test_the_order_of_reports_comes_back(store: Store) -> None:
    driver = await collecting(store)
    key, cohort = driver.cohort("one")
    order = [cohort[3], cohort[0]]
    await driver.send(*(UpdateReported(key, name, digest_of(name), 1.0) for name in order))
    attempt = await attempt_of(store, 0.0)
    assert [(each.client_id, each.report_number) for each in attempt.reported] == [(order[0], 1), (order[1], 2)]
    assert all(each.report_number is None for each in attempt.assignments.values() if each.is_busy)


async def test_the_last_save_of_each_job_has_a_name(store: Store) -> None:
    driver = Driver(store)
    for job_id in ("one", "two", "three"):
        await driver.create(job_id)
    both = driver.propose(OperatorCommand("one", JobAction.PAUSE), OperatorCommand("two", JobAction.PAUSE))
    await store.jobs.save(both.changes, NOW, save_id="first")
    driver.coordinator.accept(both)
    proposal = driver.propose(OperatorCommand("two", JobAction.RESUME))
    await store.jobs.save(proposal.changes, NOW, save_id="second")
    assert [await store.jobs.find_last_save(job_id) for job_id in ("one", "two", "three")] == ["first", "second", ""]


async def test_a_save_that_was_refused_leaves_no_name(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    proposal = driver.propose(OperatorCommand("one", JobAction.PAUSE))
    await store.jobs.save(proposal.changes, NOW, save_id="first")
    with pytest.raises(StaleRevisionError):
        await store.jobs.save(proposal.changes, NOW, save_id="again")
    assert await store.jobs.find_last_save("one") == "first"


@pytest.mark.fault("F10")
async def test_asking_for_the_last_save_waits_for_one_that_is_under_way(database: str) -> None:
    """The server may have lost its connection while the database was about to commit."""
    store, engine = await open_store(database), create_engine(async_url(database))
    await Driver(store).create("one")
    async with engine.execution_options(**{WRITES: True}).begin() as connection:
        await connection.execute(tables.jobs.update().values(save_id="mine"))
        asking = asyncio.create_task(store.jobs.find_last_save("one"))
        for _ in range(5):
            await store.ping()
        assert not asking.done()
    assert await asking == "mine"
    await engine.dispose()
    await store.close()


async def test_a_score_that_is_said_again_is_noted_once(store: Store) -> None:
    driver = Driver(store)
    await driver.create("one")
    for _ in range(3):
        await store.jobs.set_version_metrics("one", 0, {"accuracy": 1 / 3})
    assert [record.row.entity for record in await store.jobs.list_history("one")].count("version") == 1
    await store.jobs.set_version_metrics("one", 0, {"accuracy": 0.5})
    assert [record.row.entity for record in await store.jobs.list_history("one")].count("version") == 2
