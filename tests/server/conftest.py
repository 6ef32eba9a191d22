"""Daemons to test, in this process and on a real socket; SQLite and PostgreSQL databases."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from sqlalchemy.engine import make_url

from fedplat_server.database import engine, schema
from support import access, databases, storm
from support.deadlines import deadline_clock
from support.fixtures import empty_database, folder, site, weather
from support.seaweedfs import s3, seaweedfs

__all__ = ["deadline_clock", "empty_database", "folder", "s3", "seaweedfs", "site", "weather"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs every test of a daemon in this process again, on a store that fails."""
    here = "folder" in metafunc.fixturenames and hasattr(metafunc.module, "daemons")
    if here and not metafunc.definition.get_closest_marker("calm"):
        failing = pytest.param("storm", marks=storm.marks(metafunc.definition.path.stem, metafunc.function.__name__))
        metafunc.parametrize("weather", ["calm", failing], indirect=True)


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str]:
    """The URL of a PostgreSQL that may be used as we please.

    It ends an idle transaction of this process after minutes only: on a busy machine a test may stall for 4 seconds.
    """
    with pytest.MonkeyPatch.context() as patch, databases.postgres_server() as url:
        patch.setattr(engine, "ABANDONED_S", 600)
        yield url


@pytest.fixture
def empty_postgres(postgres_server: str) -> Generator[str]:
    """The URL of an empty PostgreSQL database, one for each test."""
    with databases.postgres_database(postgres_server, "template1") as url:
        yield url


@pytest.fixture(scope="session")
def postgres_template(postgres_server: str) -> Generator[str]:
    """The name of a PostgreSQL database with the tables of this version, to be copied."""
    with databases.postgres_database(postgres_server, "template1") as url:
        schema.upgrade(url)
        databases.in_thread(access.add_operator_to(url))
        yield make_url(url).database or ""


@pytest.fixture
def postgres(postgres_server: str, postgres_template: str) -> Generator[str]:
    """The URL of a PostgreSQL database with the tables of this version, one for each test."""
    with databases.postgres_database(postgres_server, postgres_template) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def any_database(request: pytest.FixtureRequest) -> str:
    """The URL of a database of each kind that is ready for a daemon."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres")
    return f"sqlite:///{request.getfixturevalue('folder') / 'fedplat.sqlite'}"
