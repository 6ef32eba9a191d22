"""The server dies at crash points while clients and the operator use HTTP/1.1 alone; nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedplat_server.verify.inspection import verify
from support.crash import chains, recompute, scenario
from support.crash.chains import Chain
from support.crash.nursery import Nursery, Order

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROWS = {
    "before the first round": (
        scenario.SMALL,
        False,
        [*chains.of("enroll"), *chains.of("model"), *chains.of("create_job"), *chains.of("begin_sessions")],
    ),
    "updates in their reports": (
        scenario.SMALL,
        False,
        ["create_job.after", *chains.of("save", "rows", "commit.model")],
    ),
    "updates in uploads": (scenario.LARGE, True, ["create_job.after", *chains.of("spool", "blob.rename")]),
}


@pytest.mark.parametrize("name", ROWS)
async def test_killed_at_points(zygote: Nursery, folder: Path, name: str) -> None:
    """Each receipt that a client has is in a version, and each version is what its updates make."""
    side, files_only, points = ROWS[name]
    database = f"sqlite:///{folder / 'fedplat.sqlite'}"
    order = Order(folder, database, folder.parent / "server.log", files_only=files_only, http=True)
    world = Chain(zygote, order)
    world.side = side
    await chains.train(world, points, lambda rounds: scenario.job_text(rounds=rounds))
    report = await verify(order.database, order.data_dir)
    assert (report.findings, report.notes) == ([], [])
    result = await recompute.read(order.database)
    recompute.check_versions(world, result, order.data_dir)
    recompute.check_receipts(world, result, kept=True)
