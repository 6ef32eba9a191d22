"""Daemons to test, in this process and on a real socket; SQLite and PostgreSQL databases."""

from __future__ import annotations

import shutil
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from fedplat_server.database import schema
from fedplat_server.training import evaluation
from server import access, databases, harness, storm
from server.faulty_store import Faults


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs every test of a daemon in this process again, on a store that fails."""
    here = "folder" in metafunc.fixturenames and hasattr(metafunc.module, "harness")
    if here and not metafunc.definition.get_closest_marker("calm"):
        failing = pytest.param("storm", marks=storm.marks(metafunc.module.__name__))
        metafunc.parametrize("weather", ["calm", failing], indirect=True)


@pytest.fixture
def weather(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Whether the stores of the daemons fail."""
    if getattr(request, "param", "calm") == "calm":
        yield
        return
    befell = Counter[str]()
    monkeypatch.setattr(harness, "BEFELL", befell)
    seed = zlib.crc32(request.node.nodeid.encode())
    monkeypatch.setattr(harness, "STORM", Faults(seed, fail_before=0.08, fail_after=0.05, delay=0.2))
    monkeypatch.setattr(evaluation, "NOTE_RETRY_S", 0.02)
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
async def site(folder: Path) -> AsyncGenerator[harness.Site]:
    """A daemon that runs."""
    async with harness.running(folder) as made:
        yield made


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str]:
    """The URL of a PostgreSQL that may be used as we please."""
    with databases.postgres_server() as url:
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
