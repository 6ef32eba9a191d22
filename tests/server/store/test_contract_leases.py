"""The lease on every kind of database, and the fence that relies on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from fedplat_server.database.engine import async_url, create_engine
from fedplat_server.database.store import LeaseStore, open_leases, open_store, require_term
from fedplat_server.errors import LeadershipLostError, StoreUnavailableError
from fedplat_server.records.lease import Candidate
from support.databases import execute_sql
from support.store.driver import JOB_FILE, draft

ONE, TWO = Candidate("d-one", "one:7443"), Candidate("d-two", "two:7443")
LONG_S = 3600.0


@pytest.fixture
async def leases(database: str) -> AsyncGenerator[LeaseStore]:
    made = await open_leases(database)
    yield made
    await made.close()


async def until_blocked(connection: AsyncConnection, table: str, task: asyncio.Task[Any]) -> None:
    """Waits until a statement on a table waits for a lock."""
    here = "wait_event_type = 'Lock' AND datname = current_database()"
    query = text(f"SELECT count(*) FROM pg_stat_activity WHERE {here} AND query LIKE '%{table}%'")
    while not (await connection.execute(query)).scalar_one():
        assert not task.done()
        await connection.execute(text("SELECT pg_stat_clear_snapshot()"))  # otherwise it sees old statistics


async def test_the_first_one_takes_it_and_the_second_learns_where_the_leader_is(leases: LeaseStore) -> None:
    assert (await leases.read()).lease is None
    lease = await leases.acquire(ONE, "secret", LONG_S)
    assert lease is not None
    assert (lease.holder, lease.address, lease.term, lease.secret) == ("d-one", "one:7443", 1, "secret")
    assert await leases.acquire(TWO, "another", LONG_S) is None
    reading = await leases.read()
    assert reading.lease == lease
    assert lease.renewed_unix_s <= reading.now_unix_s < lease.expires_unix_s
    assert lease.expires_unix_s - lease.renewed_unix_s == pytest.approx(LONG_S, abs=0.001)


async def test_an_expired_lease_changes_hands_with_a_higher_term(leases: LeaseStore) -> None:
    first = await leases.acquire(ONE, "s1", 0.0)
    second = await leases.acquire(TWO, "s2", LONG_S)
    assert first is not None
    assert second is not None
    assert (second.holder, second.term) == ("d-two", 2)
    assert not await leases.renew(first, LONG_S)
    await leases.release(first)
    assert (await leases.read()).lease == second


async def test_a_renewal_moves_the_end(leases: LeaseStore) -> None:
    lease = await leases.acquire(ONE, "s1", 0.0)
    assert lease is not None
    assert await leases.renew(lease, LONG_S)
    renewed = (await leases.read()).lease
    assert renewed is not None
    assert renewed.expires_unix_s > lease.expires_unix_s + LONG_S / 2
    assert (renewed.holder, renewed.term, renewed.secret) == ("d-one", 1, "s1")
    assert await leases.acquire(TWO, "s2", LONG_S) is None


async def test_a_released_lease_is_free_at_once_and_terms_never_repeat(leases: LeaseStore) -> None:
    lease = await leases.acquire(ONE, "s1", LONG_S)
    assert lease is not None
    await leases.release(lease)
    assert not await leases.renew(lease, LONG_S)
    second = await leases.acquire(TWO, "s2", LONG_S)
    assert second is not None
    assert second.term == 2


async def test_a_term_that_is_over_is_not_renewed_by_the_daemon_that_leads_again(leases: LeaseStore) -> None:
    first = await leases.acquire(ONE, "s1", LONG_S)
    second = await leases.acquire(ONE, "s2", LONG_S)  # it has lost track of its own lease
    assert first is not None
    assert second is not None
    assert not await leases.renew(first, 2 * LONG_S)
    assert (await leases.read()).lease == second
    assert await leases.renew(second, LONG_S)


async def test_the_lease_of_another_name_is_left_alone(database: str, leases: LeaseStore) -> None:
    store = await open_store(database)
    engine = create_engine(async_url(database))
    row = "'other', 'd-other', 'other:1', 7, 'secret', 1.0, 2.0"
    try:
        async with engine.begin() as connection:
            columns = "name, holder, address, term, secret, renewed_unix_s, expires_unix_s"
            await connection.execute(text(f"INSERT INTO leases ({columns}) VALUES ({row})"))
        lease = await leases.acquire(ONE, "s1", LONG_S)
        assert lease is not None
        assert lease.term == 1
        assert await leases.renew(lease, LONG_S)
        await store.fence(1)
        await leases.release(lease)
        async with engine.connect() as connection:
            query = text("SELECT * FROM leases WHERE name = 'other'")
            assert str(tuple((await connection.execute(query)).one())) == f"({row})"
    finally:
        await engine.dispose()
        await store.close()


async def test_of_many_that_take_it_at_once_one_gets_it(database: str) -> None:
    several = [await open_leases(database) for _ in range(4)]
    try:
        taken = await asyncio.gather(
            *(each.acquire(Candidate(f"d-{n}", "x:1"), f"s{n}", LONG_S) for n, each in enumerate(several))
        )
        assert sum(lease is not None for lease in taken) == 1
    finally:
        for each in several:
            await each.close()


@pytest.mark.fault("F20")
async def test_a_write_of_an_older_term_is_rejected(database: str) -> None:
    leases, store = await open_leases(database), await open_store(database)
    try:
        await leases.acquire(ONE, "s1", 0.0)
        await store.fence(1)
        await store.jobs.create_job(draft("j-1"), JOB_FILE, "key-1")
        await leases.acquire(TWO, "s2", LONG_S)
        with pytest.raises(LeadershipLostError, match="another daemon leads in term 2"):
            await store.jobs.create_job(draft("j-2"), JOB_FILE, "key-2")
        assert [job.state.job_id for job in await store.jobs.load_jobs()] == ["j-1"]
        with pytest.raises(LeadershipLostError):
            await store.fence(1)
    finally:
        await store.close()
        await leases.close()


@pytest.mark.fault("F19", "F20")
async def test_a_term_ends_only_after_the_writes_that_passed_its_fence(postgres: str) -> None:
    leases = await open_leases(postgres)
    old: LeaseStore = await open_leases(postgres)
    try:
        lease = await leases.acquire(ONE, "s1", 0.0)
        assert lease is not None
        async with old._engine.begin() as writing:  # pyright: ignore[reportPrivateUsage]
            await writing.run_sync(require_term, 1)
            taking = asyncio.create_task(leases.acquire(TWO, "s2", LONG_S))
            await until_blocked(writing, "leases", taking)
        # Committed: the next holder of the lease sees what was written.
        taken = await taking
        assert taken is not None
        assert taken.term == 2
    finally:
        await old.close()
        await leases.close()


@pytest.mark.fault("F19", "F20")
async def test_a_leader_that_is_stopped_in_the_middle_of_a_statement_does_not_keep_the_lease(postgres: str) -> None:
    """PostgreSQL waits for the next message of the stopped process, which `idle_in_transaction_session_timeout` ends
    only between statements: here the session is active, after the preparation of a statement that is not executed.
    """
    leases = LeaseStore(create_engine(async_url(postgres), timeout_s=20.0), abandoned_s=0.0)
    stopped = await asyncpg.connect(postgres)
    try:
        assert await leases.acquire(ONE, "s1", LONG_S) is not None
        await stopped.execute("BEGIN")
        await stopped.execute("SELECT term FROM leases FOR KEY SHARE")
        await stopped.prepare("SELECT 1")
        assert await leases.acquire(TWO, "s2", LONG_S) is None
        assert not stopped.is_closed()
        await execute_sql(postgres, "UPDATE leases SET expires_unix_s = 0.0")
        taken = await leases.acquire(TWO, "s2", LONG_S)
        assert taken is not None
        assert taken.term == 2
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError)):
            await stopped.execute("COMMIT")
    finally:
        stopped.terminate()
        await leases.close()


async def test_a_renewal_does_not_wait_for_writes_that_passed_the_fence(postgres: str) -> None:
    leases, other = await open_leases(postgres), await open_leases(postgres)
    try:
        lease = await leases.acquire(ONE, "s1", LONG_S)
        assert lease is not None
        async with other._engine.begin() as writing:  # pyright: ignore[reportPrivateUsage]
            await writing.run_sync(require_term, 1)
            assert await leases.renew(lease, LONG_S)
    finally:
        await other.close()
        await leases.close()


@pytest.mark.fault("F19")
async def test_a_severed_store_lets_go_of_a_database_that_does_not_answer(postgres: str) -> None:
    """Another connection locks the row of the job and never releases it, like a network that drops everything."""
    store, blocker = await open_store(postgres), await open_leases(postgres)
    try:
        await store.jobs.create_job(draft("j-1"), JOB_FILE, "key-1")
        async with blocker._engine.begin() as blocking:  # pyright: ignore[reportPrivateUsage]
            await blocking.execute(text("SELECT 1 FROM jobs FOR UPDATE"))
            writing = asyncio.create_task(store.jobs.set_version_metrics("j-1", 0, {}))
            await until_blocked(blocking, "jobs", writing)
            await store.sever()
            with pytest.raises(LeadershipLostError):
                await writing
            with pytest.raises(LeadershipLostError):
                await store.jobs.load_jobs()
            await store.close()
    finally:
        await blocker.close()


@pytest.mark.fault("F19")
async def test_a_transaction_that_has_not_begun_when_the_store_is_severed_gives_its_turn_back(database: str) -> None:
    """Cancelled before its first step, it would keep the turn of the only writer, and the daemon would never end."""
    store = await open_store(database)
    writes = [asyncio.ensure_future(store.jobs.set_version_metrics("j-1", 0, {})) for _ in range(8)]
    await asyncio.sleep(0)
    await store.sever()
    for write in writes:
        with pytest.raises(LeadershipLostError):
            await write
    with pytest.raises(LeadershipLostError):
        await store.jobs.set_version_metrics("j-1", 0, {})
    await store.close()


async def test_a_database_that_is_gone_is_reported(postgres: str) -> None:
    leases = await open_leases(postgres)
    try:
        await leases.acquire(ONE, "s1", LONG_S)
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        await execute_sql(postgres, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
        found = None
        while found is None:
            try:
                found = (await leases.read()).lease
            except StoreUnavailableError:
                continue
        assert found.holder == "d-one"
    finally:
        await leases.close()
