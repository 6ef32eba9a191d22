"""A copy of a healthy database and its files for each test, of each kind."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from support import databases
from support.verify.places import MakePlace, Place, healthy


@pytest.fixture(scope="module")
async def healthy_sqlite(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Place:
    folder = tmp_path_factory.mktemp("healthy")
    path = shutil.copy(empty_database, folder / "fedplat.sqlite")
    return await healthy(f"sqlite:///{path}", folder)


@pytest.fixture(scope="module")
async def healthy_postgres(
    tmp_path_factory: pytest.TempPathFactory, postgres_server: str, postgres_template: str
) -> AsyncGenerator[Place]:
    with databases.postgres_database(postgres_server, postgres_template) as url:
        yield await healthy(url, tmp_path_factory.mktemp("healthy"))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> MakePlace:
    """What copies a healthy database and its blobs, of each kind."""
    original: Place = request.getfixturevalue(f"healthy_{request.param}")
    numbers = itertools.count()

    @contextlib.contextmanager
    def copy() -> Generator[Place]:
        folder = tmp_path / f"copy{next(numbers)}"
        if request.param == "sqlite":
            yield original.copy(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)
            return
        server: str = request.getfixturevalue("postgres_server")
        with databases.postgres_database(server, make_url(original.database).database or "") as url:
            yield original.copy(url, folder)

    return copy


@pytest.fixture
def place(places: MakePlace) -> Generator[Place]:
    """A copy of a healthy database and its blobs, of each kind."""
    with places() as made:
        yield made
