"""Versions that are encoded steps, against the real server: which clients get the delta, and what it decodes to."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest

from fedplat import codecs
from fedplat.codecs.container import Format, options_to_text
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2
from support.daemons import RawClient, Site, digest_of, update_of
from support.jobs import job_file

EDEN = codecs.Eden(bits=4)
MORE = '[compression]\ndownlink = {codec = "eden", bits = 4}\n'


def base_model(size: int = 30_000) -> Parameters:
    rng = np.random.default_rng(0)
    arrays = {"weight": rng.normal(size=size).astype("f4"), "half": np.ones(70, "f2"), "steps": np.arange(3)}
    return Parameters.from_arrays(arrays, "max")


async def second_round(site: Site, base: Parameters, text: str) -> tuple[list[RawClient], list[fleet_pb2.Assignment]]:
    """The assignments after a round of clients that know no codec."""
    await site.operator.start(text, base)
    clients = await site.fleet(2)
    for client, work in zip(clients, await site.assign(clients), strict=True):
        assert not work.HasField("delta")  # the initial model has no delta
        await client.deliver(work.token, update_of(base, 1).to_bytes())
    return clients, list(await asyncio.gather(*(client.assignment() for client in clients)))


async def test_the_next_version_is_the_last_one_and_the_delta(site: Site) -> None:
    base = base_model()
    clients, assignments = await second_round(site, base, job_file(rounds=2, more=MORE))
    delta, model = assignments[0].delta, assignments[0].model
    assert (delta.base_digest, delta.codec) == (digest_of(base.to_bytes()), options_to_text(EDEN))
    content = await clients[0].download(delta.digest)
    assert (len(content), digest_of(content)) == (delta.size_bytes, delta.digest)
    assert len(content) < model.size_bytes / 6
    step = Format(EDEN, base.schema).decode(content)
    version = base.plus(np.concatenate([block.copy() for block in step.to_blocks()]))
    version["steps"] = next(iter(step.read_carried(base.schema.segments[0])))
    assert version.to_bytes() == await clients[0].download(model.digest)
    assert assignments[1].delta == delta


async def test_deltas_are_for_the_population_alone(site: Site) -> None:
    _, assignments = await second_round(site, base_model(), job_file(rounds=2, more=MORE))
    stranger = await site.enroll("others")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stranger.download(assignments[0].delta.digest)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_what_comes_with_its_assignment_needs_no_delta(site: Site) -> None:
    _, assignments = await second_round(site, base_model(100), job_file(rounds=2, more=MORE))
    assert assignments[0].model_bytes
    assert not assignments[0].HasField("delta")


async def test_a_delta_is_not_offered_unless_it_is_smaller_than_the_model(site: Site) -> None:
    text = job_file(rounds=2, more='[compression]\ndownlink = {codec = "none"}\n')
    base = Parameters.from_arrays({"weight": np.ones(30_000, np.float16)})
    _, assignments = await second_round(site, base, text)
    assert not assignments[0].HasField("delta")
