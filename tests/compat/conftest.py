"""Releases and databases for the tests of several versions."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from fedplat_server.database import schema
from support import databases, releases


@pytest.fixture(scope="session", params=releases.names())
def release(request: pytest.FixtureRequest) -> releases.Release:
    """Each release."""
    return releases.install(request.param)


@pytest.fixture(scope="session")
def last() -> releases.Release:
    """The last release: version N-1, if this one is N."""
    return releases.install(releases.names()[-1])


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str]:
    with databases.postgres_server() as url:
        yield url


@pytest.fixture
def empty_postgres(postgres_server: str) -> Generator[str]:
    with databases.postgres_database(postgres_server, "template1") as url:
        yield url


@pytest.fixture
def postgres(empty_postgres: str) -> str:
    """A database with the tables of this version."""
    schema.upgrade(empty_postgres)
    return empty_postgres
