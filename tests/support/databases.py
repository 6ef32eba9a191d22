"""Real PostgreSQL databases for tests, and SQL on them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import os
import sqlite3
import tempfile
import uuid
from collections.abc import Coroutine, Generator
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy.engine import make_url

from fedplat_server.database import schema
from support import access
from support.own_postgres import Postgres

_numbers = itertools.count()


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


def create_sqlite(path: Path) -> str:
    """Write a SQLite database with the tables of this version and the operator of the tests; return its URL."""
    path.write_bytes(_sqlite_template())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        # Else all would be copies of one database, and so the owners of the same stores.
        connection.execute("UPDATE database_identity SET database_id = ?", [uuid.uuid4().hex])
    return f"sqlite:///{path}"


@functools.cache
def _sqlite_template() -> bytes:
    with tempfile.TemporaryDirectory(prefix="fedplat-sqlite-") as folder:
        path = Path(folder) / "fedplat.sqlite"
        in_thread(_fill(f"sqlite:///{path}"))
        return path.read_bytes()


async def _fill(database: str) -> None:
    await asyncio.to_thread(schema.upgrade, database)
    await access.add_operator_to(database)


@contextlib.contextmanager
def postgres_server() -> Generator[str]:
    """The URL of a PostgreSQL that may be used as we please: FEDPLAT_TEST_POSTGRES, or one started for the tests."""
    if given := os.environ.get("FEDPLAT_TEST_POSTGRES"):
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="fedplat-postgres-") as folder:
        server = Postgres(Path(folder))
        try:
            # Nothing here needs to survive a power failure.
            in_thread(execute_sql(server.url, "ALTER SYSTEM SET fsync = off", "SELECT pg_reload_conf()"))
            yield server.url
        finally:
            server.close()


@contextlib.contextmanager
def postgres_database(server: str, template: str) -> Generator[str]:
    """The URL of a new database that is a copy of another."""
    name = f"fedplat_test_{os.getpid()}_{next(_numbers)}"
    in_thread(execute_sql(server, f"CREATE DATABASE {name} TEMPLATE {template}"))
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        in_thread(execute_sql(server, f"DROP DATABASE {name} WITH (FORCE)"))
