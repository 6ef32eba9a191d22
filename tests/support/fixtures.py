"""Fixtures of daemons, for the `conftest.py` of each folder that needs them."""

from __future__ import annotations

import shutil
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from fedplat_server import retries
from support import daemons, databases, storm
from support.faulty_store import Faults


@pytest.fixture
def weather(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Whether the stores of the daemons fail."""
    if getattr(request, "param", "calm") == "calm":
        yield
        return
    befell = Counter[str]()
    monkeypatch.setattr(daemons, "BEFELL", befell)
    seed = zlib.crc32(request.node.nodeid.encode())
    monkeypatch.setattr(daemons, "STORM", Faults(seed, fail_before=0.08, fail_after=0.05, delay=0.2))
    monkeypatch.setattr(retries, "BACKGROUND_RETRY_S", 0.02)
    yield
    calls = befell.pop("calls", 0)
    assert befell or calls < 100, f"nothing befell {calls} calls of the store: this was no storm"
    request.node.user_properties.append((storm.PROPERTY, dict(befell)))


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the tables of this version and the operator of the tests, to be copied."""
    path = tmp_path_factory.mktemp("database") / "fedplat.sqlite"
    databases.create_sqlite(path)
    return path


@pytest.fixture
def folder(tmp_path: Path, empty_database: Path, weather: None) -> Path:
    """A data folder that is ready for a daemon."""
    path = tmp_path / "data"
    path.mkdir()
    shutil.copy(empty_database, path / "fedplat.sqlite")
    return path


@pytest.fixture
async def site(folder: Path) -> AsyncGenerator[daemons.Site]:
    """A daemon that runs."""
    async with daemons.running(folder) as made:
        yield made
