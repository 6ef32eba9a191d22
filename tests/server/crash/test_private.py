"""The server dies while it makes or commits a private release: its row of the ledger is there, or it is not."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.rounds.invariants.records import StoredAttempt, StoredJob
from fedplat_server.verify import files
from fedplat_server.verify.inspection import verify
from support.crash import recompute, scenario
from support.crash.nursery import Nursery, Order
from support.crash.scenario import KILLED, World
from support.jobs import job_file

pytestmark = pytest.mark.slow
CLIP, NOISE = 3.0, 1e-3
TEXT = job_file(
    "matrix",
    rounds=2,
    goal=1,
    close="deadline",
    more=f'[updates]\nweighting = "uniform"\nclip_norm = {CLIP}\n'
    f'[privacy]\nparticipation = "fixed"\ndelta = 1e-6\nnoise_multiplier = {NOISE}\n',
)
# The saves of a training with one client are counted in test_matrix.py: 4 it has reported, 5 the version is committed.
BEFORE = ["save.after:4", "commit.model.after", "save.uncharged", "save.uncommitted:5"]
AFTER = ["save.after:5"]


class Watched(World):
    """A world whose database is looked at while the server is dead."""

    charged: int = -1

    async def _one_life(self, order: Order) -> None:
        await super()._one_life(order)
        if self.statuses[-1] == KILLED:
            self.charged = len((await found(self))[0].ledger)


async def found(world: World) -> tuple[StoredJob, dict[tuple[int, int], StoredAttempt]]:
    """The job and its attempts, of which nothing is broken: each release has its row."""
    assert (await verify(world.order.database, world.order.data_dir)).findings == []
    job, attempts = await recompute.read(world.order.database)
    assert [row.version for row in job.ledger] == [version.version for version in job.versions[1:]]
    return job, attempts


@pytest.fixture
async def world(zygote: Nursery, folder: Path, database: str) -> Watched:
    return Watched(zygote, Order(folder, database, folder.parent / "server.log"))


@pytest.mark.fault("F6")
@pytest.mark.parametrize("point", [*BEFORE, *AFTER])
async def test_killed_during_a_private_release(world: Watched, point: str) -> None:
    await scenario.train(world, TEXT, [point], num_clients=1)
    assert world.statuses == [KILLED, 0]
    assert world.charged == (point in AFTER)
    job, attempts = await found(world)
    assert len(job.ledger) == 2
    assert sorted(attempts) == [(1, 1), (2, 1)]
    recompute.check_receipts(world, (job, attempts), kept=True)
    blobs = world.order.data_dir / "blobs"
    models = [Parameters.open(files.path_of(blobs, version.digest)) for version in job.versions]
    for round_, (before, after) in enumerate(itertools.pairwise(models), start=1):
        update = scenario.update(0, round_).to_vector().astype(float)
        rest = after.to_vector() - before.to_vector() - update * CLIP / np.linalg.norm(update)
        assert 0 < np.abs(rest).max() < 9 * NOISE * CLIP
    assert not [path for path in (world.order.data_dir / "uploads").rglob("*") if path.is_file()]
