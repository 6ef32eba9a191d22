"""The leader dies at every step of the spool, and its disk is lost: another host continues from the store."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from fedplat_server.storage import blob_objects
from fedplat_server.storage.blob_folder import path_of
from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.storage.object_store import ObjectStore
from fedplat_server.storage.spool_backend import list_names
from fedplat_server.verify.inspection import verify
from support.crash import chains, recompute, scenario
from support.crash.chains import Chain
from support.crash.nursery import Nursery, Order
from support.crash.scenario import KILLED
from support.seaweedfs import SeaweedFS

# tests/server/test_object_spool.py has the same steps without processes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FETCHES = ["commit.model.before", *chains.of("spool_store.fetch")]
"""With all updates of a round accepted, the next two hosts fetch them."""
POINTS = [
    *(point for point in chains.of("spool_store") if point not in FETCHES),
    *("spool_store.put.before:2", "spool_store.put.after:2"),
    *(*chains.of("spool.keep"), "spool.new_folder.after", "upload.append.after", *chains.of("spool.sync")),
    *("upload.discard.after", *chains.of("spool.discard"), "save.uncommitted:5", "save.after:5"),
]
HALVES = [slice(0, None, 2), slice(1, None, 2)]


class Hosts(Chain):
    """A server whose lives are on hosts of their own: each begins with an empty data folder."""

    async def _one_life(self, order: Order) -> None:
        await asyncio.to_thread(shutil.rmtree, order.data_dir)
        order.data_dir.mkdir()
        await super()._one_life(order)


@pytest.fixture
async def hosts(zygote: Nursery, folder: Path, postgres: str, s3: SeaweedFS) -> Hosts:
    url, log = s3.url(), folder.parent / "server.log"
    return Hosts(zygote, Order(folder, postgres, log, blobs=url, spool=url, environment=s3.environment))


def mirror(url: str, folder: Path) -> Path:
    """A data folder with the models of the object store."""
    objects = ObjectStore(url)
    for digest, stored in blob_objects.list_objects(objects):
        path = path_of(folder / "blobs", digest)
        path.parent.mkdir(parents=True)
        objects.get_file(blob_objects.name_of(digest), path, stored.size_bytes)
    return folder


async def check(hosts: Hosts) -> None:
    """No acknowledged update is lost, the models are the same bit for bit, and nothing is left in the store."""
    order = hosts.order
    place = BlobPlace(order.data_dir, order.blobs)
    report = await verify(order.database, order.data_dir, blobs=place, uploads=order.spool)
    assert report.findings == []
    assert not [note for note in report.notes if "updates" in note]
    result = await recompute.read(order.database)
    recompute.check_versions(hosts, result, mirror(order.blobs, order.data_dir.parent / "mirror"))
    recompute.check_receipts(hosts, result, kept=True)
    assert list(list_names(ObjectStore(order.spool))) == []


@pytest.mark.fault("F2", "F53")
@pytest.mark.parametrize("seed", [12])
@pytest.mark.parametrize("half", HALVES, ids=["first", "second"])
async def test_killed_at_each_step_of_the_spool(hosts: Hosts, seed: int, half: slice) -> None:
    points = ["create_job.after", *chains.draw(seed, *chains.draw(seed, *POINTS)[half], FETCHES)]
    await chains.train(hosts, points, lambda rounds: scenario.job_text(rounds=rounds))
    await check(hosts)


@pytest.mark.fault("F2", "F53")
async def test_killed_in_the_middle_of_a_round(hosts: Hosts) -> None:
    """The round continues on the second host: no attempt is lost."""
    await scenario.train(hosts, scenario.job_text(), [""], scenario.kill_in_the_second_round)
    assert hosts.statuses == [KILLED, 0]
    await check(hosts)
    _, attempts = await recompute.read(hosts.order.database)
    assert sorted(attempts) == [(number, 1) for number in range(1, scenario.ROUNDS + 1)]


@pytest.mark.fault("F2", "F53")
async def test_killed_beside_a_half_full_buffer(hosts: Hosts) -> None:
    await scenario.train(hosts, scenario.buffered_text(), [""], scenario.kill_after_the_second_version, num_clients=4)
    assert hosts.statuses == [KILLED, 0]
    await check(hosts)
