"""Daemons to test: in this process, on a real socket, with SQLite."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from fedplat_server.store import schema
from server import harness


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the tables of this version, to be copied."""
    path = tmp_path_factory.mktemp("database") / "fedplat.sqlite"
    schema.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def folder(tmp_path: Path, empty_database: Path) -> Path:
    """A data folder that is ready for a daemon."""
    path = tmp_path / "data"
    path.mkdir()
    shutil.copy(empty_database, path / "fedplat.sqlite")
    return path


@pytest.fixture
async def site(folder: Path) -> AsyncGenerator[harness.Site]:
    """A daemon that runs."""
    async with harness.running(folder) as made:
        yield made
