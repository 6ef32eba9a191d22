"""The server dies while old versions are being removed: nothing that is needed goes, and no seed of noise stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fedplat.wire.v1 import admin_pb2
from fedplat_server.database.store import open_store
from fedplat_server.verify.inspection import verify
from support import daemons, trees
from support.crash import chains, scenario
from support.crash.chains import Chain
from support.crash.nursery import Nursery, Order
from support.crash.scenario import World

pytestmark = [pytest.mark.slow, pytest.mark.calm("the daemons of these tests are other processes")]
POINTS = chains.of("retention")
DELETING = [
    *("delete.mark.before", "delete.mark.after", "delete.part.before", "delete.part.after"),
    *("delete.part.before:2", "delete.part.after", "delete.part.before", "delete.part.after"),
]
"""The parts are the history, the assignments, the files and the rest."""
FORGETFUL = "[retention]\nversions = 1\nstates = 1\nhistory_days = 1e-9\n"


@pytest.fixture
async def world(zygote: Nursery, folder: Path, database: str) -> Chain:
    return Chain(zygote, Order(folder, database, folder.parent / "server.log"))


async def files(world: World) -> tuple[set[str], set[str]]:
    """The blobs that are there, and those that the database names, once a last start has tidied up."""
    order = world.order
    async with daemons.running(order.data_dir, database=order.database):
        pass
    store = await open_store(order.database)
    try:
        named = set(await store.retention.list_referenced())
    finally:
        await store.close()
    return {path.name for path in (order.data_dir / "blobs").glob("??/??/*") if path.is_file()}, named


@pytest.mark.fault("F48")
@pytest.mark.parametrize("seed", [5])
async def test_killed_while_old_versions_are_removed(world: Chain, seed: int) -> None:
    points = chains.draw(seed, *POINTS)
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds + 3, retention=FORGETFUL))
    assert (await verify(world.order.database, world.order.data_dir)).findings == []
    there, named = await files(world)
    assert there == named
    assert (await verify(world.order.database, world.order.data_dir)).findings == []


@pytest.mark.fault("F48")
@pytest.mark.parametrize("seed", [6])
async def test_no_seed_survives_a_crash(world: Chain, seed: int) -> None:
    """A job with a tree of noise, killed before and after each step in which a state goes; it ends all the same."""
    others = [point for point in POINTS if "history" not in point]
    points = chains.draw(seed, *others, "save.after", "commit.state.after")
    await chains.train(world, points, lambda rounds: trees.text(rounds + 1), num_clients=2)
    there, named = await files(world)
    assert there == named
    assert trees.seeds(world.order.data_dir) == []
    assert (await verify(world.order.database, world.order.data_dir)).findings == []


async def test_killed_while_a_job_is_deleted(world: Chain, zygote: Nursery) -> None:
    """It is shown as before, or not at all, and all of it goes, with one row of the audit log."""
    await chains.train(world, [], lambda rounds: scenario.job_text(rounds=rounds))
    order, job = world.order, world.job
    again = Chain(zygote, order)

    async def delete() -> None:
        try:
            await again.ask(lambda site: site.operator.jobs.DeleteJob(admin_pb2.JobRequest(job=job)))
        except aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.NOT_FOUND:  # it died when the job was marked
                raise

    async with asyncio.timeout(daemons.PATIENCE_S + 20.0 * len(DELETING)), asyncio.TaskGroup() as group:
        living = group.create_task(again.live(DELETING))
        await delete()

        async def is_over() -> bool:
            return len(again.statuses) == len(DELETING)

        await daemons.until(is_over, "the last death")
        await again.ask(lambda site: site.operator.jobs.ListJobs(admin_pb2.ListJobsRequest()))
        await again.stop()
        await living
    assert await files(world) == (set(), set())
    assert (await verify(order.database, order.data_dir)).findings == []
    store = await open_store(order.database)
    try:
        assert await store.deletion.list_deleted() == []
        assert await store.jobs.load_jobs() == []
        assert [row.subject for row in await store.audit.list_rows() if row.action == "job deleted"] == [job]
    finally:
        await store.close()
