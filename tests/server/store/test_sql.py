"""What only databases do: concurrency, failures, and surviving them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
import sqlite3
import time
import tracemalloc
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import sqlalchemy
from sqlalchemy import event, exc, text

from fedplat.rounds.events import AssignmentFailed, JobAction, OperatorCommand
from fedplat.rounds.states import JobStatus, Reason
from fedplat.texts import shorten
from fedplat_server.database import transactions
from fedplat_server.database.engine import async_url, create_engine, translate_errors
from fedplat_server.database.records import AttemptFilter
from fedplat_server.database.store import Store, open_store
from fedplat_server.database.transactions import MAX_TRIES, Database
from fedplat_server.errors import ConfigError, StoreError, StoreFullError, StoreUnavailableError
from support.databases import execute_sql
from support.store.driver import JOB_FILE, NOW, Driver, check_invariants, draft, eventful, run_to_the_end, token_hash


def is_postgres(database: str) -> bool:
    return database.startswith("postgres")


SHORT_JOB = JOB_FILE.replace("rounds = 3", "rounds = 1").replace("goal = 3", "goal = 2")


@contextlib.asynccontextmanager
async def opened(database: str) -> AsyncGenerator[Store]:
    store = await open_store(database)
    try:
        yield store
    finally:
        await store.close()


# --- concurrency -----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_forty_writers_and_forty_readers(store: Store, database: str) -> None:
    drivers = [Driver(store, prefix=f"job {n} ", check=False) for n in range(40)]

    async def write(n: int) -> None:
        await drivers[n].create(f"job {n}", SHORT_JOB)
        await run_to_the_end(drivers[n], f"job {n}", f"client of {n}")

    async def read(n: int) -> None:
        for _ in range(5):
            await store.jobs.list_history(f"job {n}")
            await store.jobs.list_attempts(AttemptFilter(f"job {n}"))
            await store.jobs.find_assignment(token_hash(f"job {n} token-1"))

    await asyncio.gather(*(write(n) for n in range(40)), *(read(n) for n in range(40)))
    jobs = [record.state for record in await store.jobs.load_jobs()]
    assert len(jobs) == 40
    assert {job.status for job in jobs} == {JobStatus.COMPLETED}
    await check_invariants(database)


async def test_two_servers_write_to_one_database(database: str) -> None:
    async with opened(database) as one, opened(database) as two:

        async def work(store: Store, name: str) -> None:
            driver = Driver(store, prefix=name, check=False)
            await driver.create(name, SHORT_JOB)
            await run_to_the_end(driver, name, name)

        await asyncio.gather(*(work(store, f"job {n} {store is one}") for store in (one, two) for n in range(4)))
        assert {record.state.status for record in await two.jobs.load_jobs()} == {JobStatus.COMPLETED}
        await check_invariants(database)


async def test_two_that_save_the_same_jobs_in_other_orders(database: str) -> None:
    async with opened(database) as one, opened(database) as two:
        driver = Driver(one)
        for job_id in "abcdef":
            await driver.create(job_id)
        for action in (JobAction.PAUSE, JobAction.RESUME) * 5:
            commands = [OperatorCommand(job_id, action) for job_id in "abcdef"]
            here, there = driver.propose(*commands), driver.propose(*reversed(commands))
            results = await asyncio.gather(
                one.jobs.save(here.changes, NOW), two.jobs.save(there.changes, NOW), return_exceptions=True
            )
            assert sum(result is None for result in results) == 1
            driver.coordinator.accept(here)  # both proposals are equal
        await driver.check()


async def test_a_cancelled_save_happens_or_not(store: Store, database: str) -> None:
    """In both cases the store continues to work."""
    driver = Driver(store)
    await driver.create("one")
    for turns in range(40):
        action = JobAction.RESUME if driver.coordinator.jobs["one"].status is JobStatus.PAUSED else JobAction.PAUSE
        proposal = driver.propose(OperatorCommand("one", action))
        task = asyncio.create_task(store.jobs.save(proposal.changes, NOW))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        (record,) = await store.jobs.load_jobs()
        if record.state.revision == proposal.jobs["one"].revision:
            driver.coordinator.accept(proposal)
        else:
            driver.coordinator.reject(proposal)
        await driver.check()
    await check_invariants(database)


async def test_history_is_numbered_in_the_order_in_which_it_appears(database: str) -> None:
    """A reader that continues after the last number it saw misses nothing, although there are several writers."""
    async with opened(database) as one, opened(database) as two:
        driver = Driver(one, check=False)
        await driver.create("one")
        done, seen = asyncio.Event(), list[int]()

        async def read() -> None:
            while True:
                last = done.is_set()
                page = await two.jobs.list_history("one", seen[-1] if seen else 0)
                seen.extend(record.sequence for record in page)
                if last and not page:
                    return

        async def note(store: Store) -> None:
            for number in range(25):
                await store.jobs.set_version_metrics("one", 0, {"n": float(number)})

        async def write() -> None:
            saving = (driver.operate("one", action) for action in (JobAction.PAUSE, JobAction.RESUME) * 10)
            await asyncio.gather(note(one), note(two), _in_order(saving))
            done.set()

        await asyncio.gather(read(), write())
        assert seen == [record.sequence for record in await one.jobs.list_history("one", limit=10_000)]


async def _in_order(coroutines: Any) -> None:
    for coroutine in coroutines:
        await coroutine


# --- failures --------------------------------------------------------------------------------------------------


@pytest.mark.fault("F7")
async def test_a_full_disk_is_unavailability_and_passes(sqlite: str) -> None:
    ways, limit = transactions.driver_for_url(async_url(sqlite)), [2**30]

    def on_begin(connection: Any) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {limit[0]}")

    event.listen(ways.engine, "begin", on_begin)
    store = Store(Database(ways), time.time)
    await store.jobs.create_job(draft("one"), JOB_FILE, "one")
    limit[0] = 1
    with pytest.raises(StoreUnavailableError, match="database or disk is full"):
        await store.jobs.create_job(draft("two"), JOB_FILE + "\n" + "# long\n" * 10_000, "two")
    assert len(await store.jobs.load_jobs()) == 1
    limit[0] = 2**30
    await store.jobs.create_job(draft("two"), JOB_FILE, "two")
    assert len(await store.jobs.load_jobs()) == 2
    await store.close()


async def test_a_broken_database_is_no_unavailability(store: Store, database: str) -> None:
    engine = create_engine(async_url(database))
    async with engine.begin() as connection:
        await connection.execute(text("DROP TABLE history"))
    await engine.dispose()
    with pytest.raises(StoreError, match="history") as caught:
        await store.jobs.create_job(draft("one"), JOB_FILE, "one")
    assert not isinstance(caught.value, StoreUnavailableError)
    assert await store.jobs.load_jobs() == []


async def test_a_nul_in_a_clients_text_is_replaced(store: Store) -> None:
    driver = Driver(store, check=False)
    await driver.create("one")
    await driver.check_in(*"abcde")
    key, _ = driver.cohort("one")
    await driver.send(AssignmentFailed(key, "a", Reason.TRAINER_ERROR, "zero \x00 byte"))
    found = await store.jobs.find_assignment(token_hash(driver.tokens["a"]))
    assert found is not None
    assert found.text == "zero \N{REPLACEMENT CHARACTER} byte"
    assert (await store.jobs.list_history("one"))[-1].row.reason == "zero \N{REPLACEMENT CHARACTER} byte"


@pytest.mark.fault("F46", "F47")
@pytest.mark.slow
async def test_what_was_stored_too_large_is_read_shortened(store: Store, database: str) -> None:
    """Rows of earlier versions, which kept a client's text in full: 9 MiB of text, and as much of metrics."""
    driver = Driver(store, check=False)
    await driver.create("one")
    await driver.check_in(*"abcde")
    key, _ = driver.cohort("one")
    await driver.send(AssignmentFailed(key, "a", Reason.TRAINER_ERROR, "short"))
    text, metrics = "\x1b" * 9 * 2**20, json.dumps({"x" * 9 * 2**20: 1.0})
    engine = create_engine(async_url(database))
    async with engine.begin() as connection:
        for table, column in (("history", "reason"), ("attempts", "reason"), ("assignments", "text")):
            change = sqlalchemy.table(table, sqlalchemy.column(column), sqlalchemy.column("metrics"))
            values = {
                column: text,
                "metrics": sqlalchemy.cast(metrics, sqlalchemy.JSON) if is_postgres(database) else metrics,
            }
            await connection.execute(sqlalchemy.update(change).values(values))
    await engine.dispose()
    tracemalloc.start()
    try:
        rows = await store.jobs.list_history("one")
        (attempt,) = await store.jobs.list_attempts(AttemptFilter("one"))
        found_attempts = await store.jobs.find_attempts([attempt.key])
        found = await store.jobs.find_assignment(token_hash(driver.tokens["a"]))
        (job,) = await store.jobs.load_jobs()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    short = shorten(text)
    assert {(record.row.reason, len(record.row.metrics)) for record in rows} == {(short, 0)}
    assert len(rows) > 5
    assert found is not None
    assert found.text == attempt.attempt.reason == short
    assert found_attempts == {attempt.key: attempt}
    assert job.state.attempt is not None
    assert {each.text for each in job.state.attempt.assignments.values()} == {short}
    assert peak < 4 * 2**20


@pytest.mark.parametrize(
    ("job_file", "mistake"), [("no TOML", "is not valid TOML"), (JOB_FILE + "\n[privacy]\nnew = 1", "do not agree")]
)
async def test_what_is_no_job_file_is_named(store: Store, job_file: str, mistake: str) -> None:
    with pytest.raises(StoreError, match=f"job file of one cannot be read by this version.*{mistake}"):
        await store.jobs.create_job(draft("one"), job_file, "one")
    assert await store.jobs.load_jobs() == []


def _fails(times: int, what: str) -> list[str]:
    """PostgreSQL: the first few inserts into history fail. A sequence keeps counting over rollbacks."""
    return [
        "CREATE SEQUENCE tries",
        f"""CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF nextval('tries') <= {times} THEN {what}; END IF;
            RETURN NEW;
        END $$""",
        "CREATE TRIGGER fail BEFORE INSERT ON history FOR EACH ROW EXECUTE FUNCTION fail()",
    ]


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
@pytest.mark.fault("F11")
async def test_a_conflict_is_tried_again(postgres: str, sqlstate: str) -> None:
    async with opened(postgres) as store:
        await execute_sql(postgres, *_fails(MAX_TRIES - 1, f"RAISE EXCEPTION 'conflict' USING ERRCODE = '{sqlstate}'"))
        await store.jobs.create_job(draft("one"), JOB_FILE, "key")
        assert len(await store.jobs.list_history("one")) == 1


@pytest.mark.fault("F11")
async def test_a_conflict_is_not_tried_forever(postgres: str) -> None:
    async with opened(postgres) as store:
        await execute_sql(postgres, *_fails(MAX_TRIES, "RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'"))
        with pytest.raises(StoreUnavailableError, match="conflict"):
            await store.jobs.create_job(draft("one"), JOB_FILE, "key")
        assert await store.jobs.load_jobs() == []
        await store.jobs.create_job(draft("one"), JOB_FILE, "key")


@pytest.mark.fault("F9")
async def test_a_connection_that_breaks_in_a_save_is_replaced(postgres: str) -> None:
    async with opened(postgres) as store:
        driver = Driver(store)
        await driver.create("one")
        await execute_sql(postgres, *_fails(1, "PERFORM pg_terminate_backend(pg_backend_pid())"))
        proposal = driver.propose(OperatorCommand("one", JobAction.PAUSE))
        with pytest.raises(StoreUnavailableError):
            await store.jobs.save(proposal.changes, NOW)
        await driver.check()  # nothing was saved
        await store.jobs.save(proposal.changes, NOW)
        driver.coordinator.accept(proposal)
        await driver.check()


@pytest.mark.fault("F9")
async def test_idle_connections_that_broke_are_replaced(postgres: str, postgres_server: str) -> None:
    async with opened(postgres) as store:
        await asyncio.gather(*(store.ping() for _ in range(5)))
        name = async_url(postgres).database
        everyone = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
        await execute_sql(postgres_server, everyone)
        await asyncio.gather(*(store.ping() for _ in range(5)))
        await store.jobs.create_job(draft("one"), JOB_FILE, "key")


@pytest.mark.fault("F9")
async def test_a_database_that_takes_no_connections_is_unavailable(postgres: str, postgres_server: str) -> None:
    name = async_url(postgres).database
    await execute_sql(postgres_server, f"ALTER DATABASE {name} CONNECTION LIMIT 0", "CREATE ROLE guest LOGIN")
    guest = async_url(postgres).set(username="guest").render_as_string(hide_password=False)
    try:
        with pytest.raises(StoreUnavailableError, match="too many connections"):
            await open_store(guest)
    finally:
        await execute_sql(postgres_server, "DROP ROLE guest")


async def test_parameters_of_libpq_in_the_url_reach_the_database(postgres: str, tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    parameters = {"application_name": "a probe", "sslrootcert": str(authority)}
    url = async_url(postgres).update_query_dict(parameters).render_as_string(hide_password=False)
    async with opened(url) as store:
        assert await store.retention.read_database_id()
        found = "datname = current_database() AND application_name = 'a probe'"
        await execute_sql(
            postgres, f"DO $$ BEGIN ASSERT (SELECT count(*) FROM pg_stat_activity WHERE {found}) > 0; END $$"
        )
    authority.unlink()
    with pytest.raises(ConfigError, match=r"sslrootcert=\S+ is no file; correct the path"):
        await open_store(url)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("database", "nosuch", r"nosuch.*does not exist; create it \(createdb\), or correct the name in --database"),
        ("username", "nosuch", r"nosuch.*does not exist; correct the user in --database \(or FEDPLAT_DATABASE\)"),
        ("parameter", "1", r"parameter.*; correct the parameters after the \? in --database"),
        ("host", "/nosuch", r"postgresql://.*does not answer .*: start it, or correct --database"),
    ],
)
async def test_a_database_that_cannot_be_used_says_what_to_do(
    postgres: str, name: str, value: str, advice: str
) -> None:
    """Its URL is shown as an operator writes it, without a password."""
    url = async_url(postgres).set(password="a secret")
    if name in ("database", "username"):
        given = url.set(database=value) if name == "database" else url.set(username=value)
    else:
        given = url.update_query_dict({name: value})
    with pytest.raises(StoreError, match=advice) as caught:
        await open_store(given.render_as_string(hide_password=False))
    assert "asyncpg" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.fault("F7")
@pytest.mark.parametrize(("free_bytes", "advice"), [(0, "free space on its disk"), (1 << 30, "check its disk")])
def test_a_full_disk_that_sqlite_calls_an_io_error_is_named(
    sqlite: str, free_bytes: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no room for the file of its shared memory, which every command needs."""
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", Mock(return_value=usage._replace(free=free_bytes)))
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    with (
        pytest.raises(StoreUnavailableError, match=f"disk I/O error; {advice}$") as caught,
        translate_errors(async_url(sqlite)),
    ):
        raise exc.OperationalError("BEGIN", None, error)
    assert isinstance(caught.value, StoreFullError) == (free_bytes == 0)


async def test_everything_lasts_through_a_new_start(database: str) -> None:
    async with opened(database) as store:
        driver = Driver(store)
        await eventful(driver)
        before = dataclasses.astuple((await store.jobs.list_versions("eventful"))[-1])
    async with opened(database) as store:
        driver.store = store
        await driver.check()
        assert dataclasses.astuple((await store.jobs.list_versions("eventful"))[-1]) == before
