"""Options of a job that an operator changes while it runs."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fedplat.wire.v1 import admin_pb2
from support import daemons
from support.daemons import Site
from support.jobs import job_file


def change(site: Site, job: str, *changes: str) -> Awaitable[admin_pb2.Job]:
    return site.operator.jobs.SetJob(admin_pb2.SetJobRequest(job=job, changes=changes))


@pytest.mark.calm("it counts files")
async def test_a_running_job_keeps_fewer_versions_at_once_and_after_a_restart(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start("# mine\n" + job_file(goal=1, rounds=9, over_selection=1.0))
        client = await site.enroll()
        for _ in range(4):
            await client.deliver((await client.assignment()).token, daemons.update_of(daemons.initial_model(), 1))
        await site.operator.until(job, "version", "4")
        changed = await change(site, job, "retention.versions=1", "retry.pause_after=3")
        assert changed.job_file.startswith("# mine\n")
        assert "versions = 1" in changed.job_file

        async def is_pruned() -> bool:
            versions = await site.operator.versions(job)
            return [one.model.version for one in versions if not one.model_removed_unix_s] == [0, 4]

        await daemons.until(is_pruned, "the files of versions 1 to 3")
        rows = await site.store.inner.audit.list_rows()
        assert [row.action for row in rows if row.subject == job][-1] == "job changed"
    async with daemons.running(folder) as site:
        assert (await site.operator.show(job)).job_file == changed.job_file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["rounds=5"], "expected KEY=VALUE with a key of \\[retention\\] or \\[retry\\]"),
        (["retention.version=5"], "retention.version = 5: there is no such key"),
        (["retention.versions=-1"], "retention.versions = -1"),
        (["retention.versions=x y"], "the value is not valid TOML"),
        ([], "there are no changes"),
    ],
)
async def test_other_changes_are_refused_in_words(site: Site, changes: list[str], message: str) -> None:
    job = await site.operator.start(job_file())
    with pytest.raises(aio.AioRpcError, match=message) as caught:
        await change(site, job, *changes)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_job_that_has_ended_is_not_changed(site: Site) -> None:
    job = await site.operator.start(job_file())
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    with pytest.raises(aio.AioRpcError, match="cannot change a job that is CANCELLED"):
        await change(site, job, "retention.versions=1")
