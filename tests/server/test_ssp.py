"""Jobs with clocks over the wire: the clocks outlive the server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fedplat.cli import job_lists
from fedplat.wire.v1 import admin_pb2
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import initial_model, update_of
from support.jobs import job_file

MORE = """\
[mode]
kind = "ssp"
concurrency = 2
slack = 0
[aggregation]
rule = "fedbuff"
learning_rate = 0.5
[updates]
weighting = "uniform"
"""


@pytest.mark.fault("F2")
async def test_a_client_ahead_waits_for_the_slowest_also_after_a_restart(folder: Path) -> None:
    """Both clients begin with version 0, so two versions are one round of FedAvg: half the sum of two updates."""
    deltas = [update_of(initial_model(), seed) for seed in range(3)]
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file("ssp", rounds=3, goal=1, more=MORE))
        clients = await site.fleet(2)
        work = await site.assign(clients)
        await clients[0].deliver(work[0].token, deltas[0])
        await site.operator.until(job, "version", "1")
    async with daemons.running(folder) as site:
        fast, slow = [client.over(site.channel) for client in clients]
        await fast.open_session()
        await slow.open_session()
        waits = asyncio.create_task(fast.assignment())
        found = (await site.operator.jobs.ShowJob(admin_pb2.JobRequest(job=job))).clocks
        assert (found.minimum, found.maximum, found.num_members, found.num_withheld) == (0, 1, 2, 1)
        assert list(found.withheld) == [fast.client_id]
        text = f"0 to 1, of 2 clients; waiting for slower ones: {fast.client_id}"
        assert job_lists.describe_clocks(found) == text
        found.num_resting = 2
        assert job_lists.describe_clocks(found) == f"{text}; at rest after they have left: 2 clients"
        await slow.deliver(work[1].token, deltas[1])
        fresh = await waits
        assert fresh.model.version == 2
        await fast.deliver(fresh.token, deltas[2])
        await site.operator.until(job, "job", "COMPLETED")
        model = await site.operator.model(job)
        report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, live=True)
        assert report.findings == []
    expected = initial_model().to_vector() + 0.5 * sum(delta.to_vector() for delta in deltas)
    np.testing.assert_allclose(model.to_vector(), expected, rtol=1e-6)
