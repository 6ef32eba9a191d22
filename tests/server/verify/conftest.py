"""A copy of a healthy database and its files for each test, of each kind."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from support import databases
from support.verify.places import Place, healthy


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
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Place]:
    """A copy of a healthy database and its blobs, of each kind."""
    if request.param == "sqlite":
        original: Place = request.getfixturevalue("healthy_sqlite")
        yield original.copy(f"sqlite:///{tmp_path / 'copy' / 'fedplat.sqlite'}", tmp_path / "copy")
        return
    original: Place = request.getfixturevalue("healthy_postgres")
    server: str = request.getfixturevalue("postgres_server")
    with databases.postgres_database(server, make_url(original.database).database or "") as url:
        yield original.copy(url, tmp_path / "copy")
