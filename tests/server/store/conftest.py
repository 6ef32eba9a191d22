"""Stores to test: in memory, on SQLite, and on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fedplat_server.store import schema
from fedplat_server.store.port import Store
from fedplat_server.store.sql import SqlStore, open_store
from fedplat_server.testing import MemoryStore
from server.store.driver import Ticks


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
