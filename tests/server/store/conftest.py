"""Stores to test, on SQLite and on a real PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fedplat_server.database.store import Store, open_store
from support import databases
from support.store.driver import Ticks

ON_POSTGRESQL = ("test_contract.py", "test_schema.py")
"""What every run tries on PostgreSQL as well; the other modules' half there is left to `make test-all`."""
PORTABLE = (
    *("test_contract_buffered.py", "test_contract_limits.py", "test_contract_participations.py"),
    *("test_contract_plugins.py", "test_contract_restart.py", "test_contract_traces.py"),
)
"""Modules without SQL of one database: no lock, upsert, list in JSON, order of texts or constraint that others lack.

On PostgreSQL they belong to the whole grid.
"""
DIALECTS = {"postgres", "postgresql"}
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents or not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        if item.path.name not in ON_POSTGRESQL and not DIALECTS.isdisjoint(map(str, item.callspec.params.values())):
            item.add_marker(pytest.mark.slow)
            if item.path.name in PORTABLE:
                item.add_marker(pytest.mark.grid)


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'fedplat.db'}"
    return request.getfixturevalue("empty_postgres")


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    """The URL of a SQLite database with the tables of this version."""
    return databases.create_sqlite(tmp_path / "fedplat.db")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of a database of each kind with the tables of this version."""
    return request.getfixturevalue(request.param)


@pytest.fixture
async def store(database: str) -> AsyncGenerator[Store]:
    """A store in each kind of database."""
    store = await open_store(database, Ticks())
    yield store
    await store.close()
