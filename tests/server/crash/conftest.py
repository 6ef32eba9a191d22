"""What forks the daemons of the crash tests, and the databases that they run on."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from support.crash import nursery
from support.crash.nursery import Nursery


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
