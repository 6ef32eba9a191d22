"""The server dies around every step of its models in an object store, here a real S3 server.

Only the points where models are written, referenced or removed: all others do not know where models are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedplat_server.database.store import open_store
from fedplat_server.storage import blob_objects
from fedplat_server.storage.blob_folder import path_of
from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.storage.object_store import ObjectStore
from fedplat_server.verify.inspection import verify
from support import daemons
from support.crash import chains, recompute, scenario
from support.crash.chains import Chain
from support.crash.nursery import Nursery, Order
from support.crash.scenario import KILLED, World
from support.seaweedfs import SeaweedFS

pytestmark = [pytest.mark.slow, pytest.mark.calm("the daemons of these tests are other processes")]
DOWNLINK = '[compression]\ndownlink = {codec = "eden"}\n'
FORGETFUL = "[retention]\nversions = 1\nstates = 1\n"
PUTTING = chains.of("object.put", "object.cache")
REMOVING = chains.of("object.delete", "retention.give_up")
ORPHANS = ["object.put.after", *chains.of("object.delete")]
"""A model without a row, which the next start and the one after it remove."""


@pytest.fixture
async def world(zygote: Nursery, folder: Path, s3: SeaweedFS) -> Chain:
    database = f"sqlite:///{folder / 'fedplat.sqlite'}"
    log = folder.parent / "server.log"
    return Chain(zygote, Order(folder, database, log, blobs=s3.url(), environment=s3.environment))


def place_of(world: World) -> BlobPlace:
    return BlobPlace(world.order.data_dir, world.order.blobs)


def mirror(world: World) -> Path:
    """A data folder with the models of the object store."""
    objects, folder = ObjectStore(world.order.blobs), world.order.data_dir.parent / "mirror"
    for digest, stored in blob_objects.list_objects(objects):
        path = path_of(folder / "blobs", digest)
        path.parent.mkdir(parents=True)
        objects.get_file(blob_objects.name_of(digest), path, stored.size_bytes)
    return folder


async def check(world: World) -> None:
    """What holds for models in a folder; and what the store has is what the database names."""
    order, place = world.order, place_of(world)
    report = await verify(order.database, order.data_dir, blobs=place)
    assert report.findings == []
    result = await recompute.read(order.database)
    recompute.check_versions(world, result, mirror(world))
    recompute.check_receipts(world, result, kept=True)
    await check_store(world)


async def check_store(world: World) -> None:
    """After one more start the store has what the database names, and nothing else."""
    async with daemons.running(world.order.data_dir, database=world.order.database, blobs=world.order.blobs):
        pass
    store = await open_store(world.order.database)
    try:
        named = await store.retention.list_referenced()
    finally:
        await store.close()
    assert place_of(world).open().all_digests() == named


@pytest.fixture(autouse=True)
def no_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the daemons that the zygote forks."""
    monkeypatch.setattr(blob_objects, "MIN_AGE_S", 0.0)


@pytest.mark.fault("F4")
@pytest.mark.parametrize("seed", [9])
async def test_killed_while_models_are_written(world: Chain, seed: int) -> None:
    """First the initial model; in a round the first object is the model of the version, the second one its state."""
    second = ["object.put.before:2", "object.put.after:2", "object.cache.after:2"]
    commits = ["commit.model.after", "commit.state.after", "save.uncharged"]
    points = [
        *(*chains.of("object.claim"), *chains.draw(seed, *PUTTING), "create_job.after"),
        *chains.draw(seed, *PUTTING, *second, *commits, ORPHANS),
    ]
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds))
    await check(world)


@pytest.mark.fault("F4")
@pytest.mark.parametrize("seed", [10])
async def test_killed_while_a_delta_is_made(world: Chain, seed: int) -> None:
    third = ["object.put.before:3", "object.put.after:3"]
    points = ["create_job.after", *chains.draw(seed, *third, *chains.of("commit.delta"))]
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds, more=DOWNLINK))
    await check(world)


@pytest.mark.fault("F48")
@pytest.mark.parametrize("seed", [11])
async def test_killed_while_old_versions_are_removed(world: Chain, seed: int) -> None:
    points = chains.draw(seed, *REMOVING)
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds + 3, retention=FORGETFUL))
    assert (await verify(world.order.database, world.order.data_dir, blobs=place_of(world))).findings == []
    await check_store(world)


@pytest.mark.fault("F2")
async def test_killed_in_a_round_and_the_local_copies_are_lost(world: World) -> None:
    """As on a host with an empty disk, but for the spool."""

    async def die_and_lose_the_copies(world: World) -> None:
        await scenario.kill_in_the_second_round(world)
        shutil.rmtree(world.order.data_dir / "blob-cache")

    await scenario.train(world, scenario.job_text(), [""], die_and_lose_the_copies)
    assert world.statuses == [KILLED, 0]
    await check(world)


def test_every_point_is_here() -> None:
    assert {*chains.of("object")} == {*chains.of("object.claim"), *PUTTING, *chains.of("object.delete")}
