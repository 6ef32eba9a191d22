"""Cyclic jobs over the wire: each client trains what the one before it has made, also after a restart."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import initial_model, update_of
from support.jobs import job_file

CYCLE = '[mode]\nkind = "cyclic"\nclients = 3\n'


async def test_the_model_goes_from_client_to_client(folder: Path) -> None:
    """The turns are not averaged: the last model is the first one and the updates of all turns."""
    deltas = [update_of(initial_model(), seed) for seed in range(3)]
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file("cyclic", rounds=3, goal=1, more=CYCLE))
        clients = await site.fleet(3)
        (work,) = await site.assign(clients[:1])
        await clients[0].deliver(work.token, deltas[0])
        await site.operator.until(job, "version", "1")
    async with daemons.running(folder) as site:
        clients = [client.over(site.channel) for client in clients]
        for client in clients:
            await client.open_session()
        await clients[0].refusal()  # it had its turn
        for version, client in enumerate(clients[1:], 1):
            assignment = await client.assignment()
            assert assignment.model.version == version
            await client.deliver(assignment.token, deltas[version])
            await site.operator.until(job, "version", str(version + 1))
        await site.operator.until(job, "job", "COMPLETED")
        model = await site.operator.model(job)
        report = await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder, live=True)
        assert report.findings == []
    expected = initial_model().to_vector() + sum(delta.to_vector() for delta in deltas)
    np.testing.assert_allclose(model.to_vector(), expected, rtol=1e-6)
