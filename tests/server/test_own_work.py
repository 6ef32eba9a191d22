"""What one operator has done is not another one's: idempotency keys, uploaded models, and the ids behind a name."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

import pytest
from grpc import aio

from fedplat.wire.v1 import admin_pb2
from support import daemons
from support.daemons import Operator, Site, initial_model
from support.jobs import job_file
from support.private_jobs import private

pytestmark = pytest.mark.calm  # they look at single answers
KEY = "a key that both have"


async def new_token(site: Site) -> str:
    return (await site.operator.operators.AddOperator(admin_pb2.AddOperatorRequest(name="ben", role="operator"))).token


async def other_operator(site: Site) -> Operator:
    return Operator(site.channel, await new_token(site))


async def refused(call: Awaitable[object]) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.details() or ""


@pytest.mark.parametrize("text", [job_file(), private()], ids=["plain", "private"])
async def test_the_key_of_another_operator_does_not_return_its_job(site: Site, text: str) -> None:
    ben = await other_operator(site)
    job = await site.operator.create(text, key=KEY)
    assert (await site.operator.create(text, key=KEY)).job_id == job.job_id  # the same call, repeated
    said = await refused(ben.create(job_file("mine"), key=KEY))
    assert "another operator" in said
    assert job.job_id not in said
    assert (await ben.create(job_file("mine"), key="a key of his own")).job_id != job.job_id


async def test_a_digest_is_no_right_to_a_model(site: Site) -> None:
    ben = await other_operator(site)
    job = await site.operator.create(job_file())
    request = admin_pb2.CreateJobRequest(
        job_file=job_file("mine"), initial_digest=job.model.digest, idempotency_key="a key of his own"
    )
    absent = admin_pb2.CreateJobRequest(
        job_file=job_file("mine"), initial_digest="0" * 64, idempotency_key="a key of his own"
    )
    assert await refused(ben.jobs.CreateJob(request)) == await refused(ben.jobs.CreateJob(absent))
    await ben.upload(initial_model())  # the bytes are his, too
    assert (await ben.jobs.CreateJob(request)).model.digest == job.model.digest


async def test_an_ambiguous_name_shows_the_ids_of_own_jobs(folder: Path) -> None:
    async with daemons.running(folder) as site:
        token = await new_token(site)
        jobs = [(await site.operator.create(job_file("twice"))).job_id for _ in range(2)]
        mine = (await Operator(site.channel, token).create(job_file("twice"))).job_id
    for _ in range(2):
        async with daemons.running(folder) as site:  # the creators are known after a restart
            said = await refused(Operator(site.channel, token).show("twice"))
            assert said.endswith(f"use the job id: {mine}, 2 of other operators (fedplat job list)")
            said = await refused(site.operator.show("twice"))
            assert [job in said for job in (*jobs, mine)] == [True, True, False]
