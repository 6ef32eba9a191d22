"""Jobs that an operator deletes: what goes, what stays, and what is refused, over gRPC and over HTTP/1.1."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import Awaitable
from pathlib import Path
from typing import cast

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc
from fedplat_server.database import tables
from fedplat_server.verify.inspection import verify
from support import daemons
from support.access import ADMIN_TOKEN, authorized
from support.daemons import Site
from support.http_channel import HttpPeer, HttpStubChannel
from support.jobs import job_file

pytestmark = [pytest.mark.slow, pytest.mark.calm("it counts files")]
TEXT = job_file(goal=1, rounds=2, over_selection=1.0)


def delete(site: Site, job: str) -> Awaitable[admin_pb2.DeleteJobResponse]:
    return site.operator.jobs.DeleteJob(admin_pb2.JobRequest(job=job))


async def train(site: Site, text: str, seed: int, rounds: int = 2) -> str:
    """Run a job with one client to its end."""
    job = await site.operator.start(text)
    client = await site.enroll()
    for _ in range(rounds):
        await client.deliver((await client.assignment()).token, daemons.update_of(daemons.initial_model(), seed))
    await site.operator.until(job, "job", "COMPLETED")
    return job


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blobs").glob("??/??/*")}


def count_rows(folder: Path, job: str) -> dict[str, int]:
    """The rows of a job by table, without the events and the audit log."""
    found: dict[str, int] = {}
    with contextlib.closing(sqlite3.connect(folder / "fedplat.sqlite")) as connection:
        for table in tables.metadata.sorted_tables:
            if "job_id" in table.c and table.name != "events":
                (found[table.name],) = connection.execute(
                    f"SELECT count(*) FROM {table.name} WHERE job_id = ?", (job,)
                ).fetchone()
    return {name: number for name, number in found.items() if number}


async def until_gone(folder: Path, job: str, left: dict[str, int]) -> None:
    async def is_gone() -> bool:
        return count_rows(folder, job) == left

    await daemons.until(is_gone, "the rows of the job")


async def test_a_deleted_job_leaves_nothing_but_its_rows_of_the_audit_log(folder: Path) -> None:
    async with daemons.running(folder) as site:
        kept, gone = await train(site, TEXT, 1), await train(site, TEXT, 2)
        named = {job: {one.model.digest for one in await site.operator.versions(job)} for job in (kept, gone)}
        assert len(named[kept] & named[gone]) == 1  # the initial model
        done = await delete(site, gone)
        assert (done.job_id, done.num_releases) == (gone, 0)
        with pytest.raises(aio.AioRpcError) as caught:
            await site.operator.show(gone)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        listed = await site.operator.jobs.ListJobs(admin_pb2.ListJobsRequest())
        assert [job.job_id for job in listed.jobs] == [kept]
        await until_gone(folder, gone, {})

        async def are_gone() -> bool:
            return not files(folder) & (named[gone] - named[kept])

        await daemons.until(are_gone, "the files of the job")
        assert named[kept] <= files(folder)
        (noted,) = [row for row in await site.store.inner.audit.list_rows() if row.action == "job deleted"]
        assert (noted.subject, json.loads(noted.details)) == (gone, {"name": "toy", "versions": 3, "releases": 0})
        status = await site.status()
        assert dict(status.num_jobs) == {"COMPLETED": 1}
    async with daemons.running(folder) as site:
        assert (await site.operator.show(kept)).status == admin_pb2.JOB_STATUS_COMPLETED
        assert np.isfinite((await site.operator.model(kept))["weight"]).all()


PRIVATE = (
    '[updates]\nweighting = "uniform"\nclip_norm = 3.0\n'
    '[privacy]\nparticipation = "fixed"\ndelta = 1e-6\nnoise_multiplier = 1.0\n'
)


async def test_the_private_releases_of_a_deleted_job_stay_in_the_ledger(folder: Path) -> None:
    text = job_file(goal=1, rounds=2, over_selection=1.0, close="deadline", more=PRIVATE).replace("1e9", "0.2")
    async with daemons.running(folder) as site:
        job = await train(site, text, 1)
        request = admin_pb2.ShowPrivacyRequest()
        (before,) = (await site.operator.privacy.ShowPrivacy(request)).populations
        assert (await delete(site, job)).num_releases == 2
        left = {"jobs": 1, "attempts": 2, "model_versions": 3, "ledger": 2}
        await until_gone(folder, job, left)
        answer = await site.operator.privacy.ShowPrivacy(request)
        assert list(answer.jobs) == []
        assert list(answer.populations) == [before]
    async with daemons.running(folder) as site:
        assert list((await site.operator.jobs.ListJobs(admin_pb2.ListJobsRequest())).jobs) == []
        assert list((await site.operator.privacy.ShowPrivacy(request)).populations) == [before]
    assert (await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings == []


async def test_a_job_that_has_not_ended_is_refused_and_one_is_deleted_over_http(folder: Path) -> None:
    async with daemons.running(folder, http_listen="127.0.0.1:0", http_operators=True) as site:
        job = await site.operator.start(TEXT)
        with pytest.raises(aio.AioRpcError, match="cannot delete a job that is RUNNING; cancel it first") as caught:
            await delete(site, job)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        watching = asyncio.create_task(site.operator.events(job))
        await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
        await watching
        peer = HttpStubChannel(HttpPeer(site.daemon.http_port))
        jobs = authorized(admin_pb2_grpc.JobsStub(cast(aio.Channel, peer)), ADMIN_TOKEN)
        assert (await jobs.DeleteJob(admin_pb2.JobRequest(job=job))).job_id == job
        with pytest.raises(aio.AioRpcError) as caught:
            await delete(site, job)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await until_gone(folder, job, {})
        client = await site.enroll()  # the clients of the population go on
        other = await site.operator.start(TEXT)
        assert (await client.assignment()).job_id == other
