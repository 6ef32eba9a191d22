"""The server dies at every crash point there is; nothing is lost, and the model is the same bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from fedplat_server.verify.checker import verify
from server.crash import nursery, points, recompute, scenario
from server.crash.nursery import Nursery, Order
from server.crash.scenario import KILLED, World

POINTS = points.all_points()


@pytest.fixture(scope="session")
async def zygote() -> AsyncGenerator[Nursery]:
    async with nursery.running() as made:
        yield made


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database of each kind with the tables of this version."""
    if request.param == "postgres":
        return request.getfixturevalue("postgres")
    folder: Path = request.getfixturevalue("folder")
    return f"sqlite:///{folder / 'fedplat.sqlite'}"


@pytest.fixture
def world(zygote: Nursery, folder: Path, database: str) -> World:
    return World(zygote, Order(folder, database, folder.parent / "server.log"))


async def check(world: World, *, kept: bool) -> None:
    """Everything that must hold after a training, however often the server died."""
    order = world.order
    report = await verify(order.database, order.data_dir)
    assert (report.findings, report.notes) == ([], [])
    await recompute.check_versions(world, order.database, order.data_dir)
    await recompute.check_receipts(world, order.database, kept=kept)
    left = [path for path in (order.data_dir / "uploads").rglob("*") if path.is_file()]
    assert left == [], "updates that nobody needs any more"


@pytest.mark.parametrize("point", ["", *POINTS])
async def test_killed_in_a_training(world: World, point: str) -> None:
    await scenario.train(world, scenario.job_text(), [point] if point else [])
    assert world.statuses == ([KILLED, 0] if point else [0])
    await check(world, kept=False)
