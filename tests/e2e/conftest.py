"""One server for all tests that neither end it nor start it with options of their own."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from support import deployment, processes


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[processes.Server]:
    """A server on which each test has populations and names of jobs for itself; it is verified at the end."""
    options = ("--webhook-network", "127.0.0.0/8")
    with processes.server(tmp_path_factory.mktemp("shared") / "server", *options) as running:
        yield running
        assert running.stop() == 0
    assert "database is locked" not in running.log_text()
    deployment.check(running)
