"""Jobs that are rolled back."""

from __future__ import annotations

import numpy as np

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2
from support.daemons import RawClient, Site


def model_of(*values: float) -> Parameters:
    return Parameters.from_arrays({"weight": np.array(values, "f4")})


ZERO = model_of(0.0, 0.0)


async def play(site: Site, clients: list[RawClient], job: str, version: int, *values: float) -> None:
    """A round in which everybody sends the same."""
    for client, work in zip(clients, await site.assign(clients), strict=True):
        assert (await client.deliver(work.token, model_of(*values))).HasField("receipt")
    await site.operator.until(job, "version", str(version))


async def roll_back(site: Site, job: str, version: int) -> admin_pb2.RollbackJobResponse:
    return await site.operator.jobs.RollbackJob(admin_pb2.RollbackJobRequest(job=job, version=version))


async def values(site: Site, job: str, version: int | None = None) -> list[float]:
    return (await site.operator.model(job, version))["weight"].tolist()
