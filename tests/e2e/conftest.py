"""One server for the tests that neither end it nor start it with options of their own, and databases for others."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from fedplat_server.database import schema
from support import databases, deployment, processes


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[processes.Server]:
    """A server on which each test has populations and names of jobs for itself; it is verified at the end."""
    options = ("--webhook-network", "127.0.0.0/8")
    with processes.server(tmp_path_factory.mktemp("shared") / "server", *options) as running:
        yield running
        assert running.stop() == 0
    assert "database is locked" not in running.log_text()
    deployment.check(running)


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str]:
    with databases.postgres_server() as url:
        yield url


@pytest.fixture
def database(postgres_server: str) -> Generator[str]:
    """An empty PostgreSQL database with the tables of this version."""
    with databases.postgres_database(postgres_server, "template1") as url:
        schema.upgrade(url)
        yield url
