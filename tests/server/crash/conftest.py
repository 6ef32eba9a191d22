"""What forks the daemons of the crash tests, and the databases that they run on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from support.crash import nursery
from support.crash.nursery import Nursery

HERE = Path(__file__).parent
EVERY_POINT = "test_killed_at_every_point"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves most kills to `make test-all`: one of each test, and of each family of crash points, is for every run.

    A family is what is before the first dot of a point's name: `blob`, `commit`, `save`. On PostgreSQL,
    and on a store that fails, every kill is slow.
    """
    seen: set[tuple[str, str]] = set()
    for item in items:
        if HERE not in item.path.parents or not isinstance(item, pytest.Function) or "zygote" not in item.fixturenames:
            continue
        params = item.callspec.params if hasattr(item, "callspec") else {}
        family = str(params.get("point", "")).partition(".")[0] if item.originalname == EVERY_POINT else ""
        first = (item.originalname, family) not in seen
        if {"postgres", "storm"}.isdisjoint(map(str, params.values())) and first:
            seen.add((item.originalname, family))
        else:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
async def zygote() -> AsyncGenerator[Nursery]:
    async with nursery.running() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest) -> str:
    """The URL of a database of each kind with the tables of this version."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres")
    folder: Path = request.getfixturevalue("folder")
    return f"sqlite:///{folder / 'fedplat.sqlite'}"
