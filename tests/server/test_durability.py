"""A server that is stopped in the middle of a round and started again, and a disk that fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.aggregate import Accumulator, Contribution
from fedplat.job import build_rule, parse_job
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.storage import spool_file
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, reason_name, update_of
from support.jobs import job_file

pytestmark = pytest.mark.calm("says itself what fails when")

DAY_S = 86_400.0
MEMORY = 'durability = "memory"\n'


async def moved(client: RawClient, site: Site) -> RawClient:
    """The same client, connected to another server."""
    there = client.over(site.channel)
    await there.open_session()
    return there


async def begun(site: Site, text: str, num_clients: int) -> tuple[str, list[RawClient], list[fleet_pb2.Assignment]]:
    job = await site.operator.start(text)
    clients = await site.fleet(num_clients)
    return job, clients, await site.assign(clients)


@pytest.mark.fault("F2", "F12", "F14", "F15")
async def test_a_round_continues_in_the_middle(folder: Path) -> None:
    """One client has reported, one uploads, one was restarted; the model is what its updates give (I10)."""
    text = job_file(goal=3, more='[aggregation]\nrule = "fedavgm"\nmomentum = 0.5\n')
    updates = [update_of(initial_model(), seed) for seed in range(3)]
    contents = [update.to_bytes() for update in updates]
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, text, 3)
        assert (await clients[2].deliver(work[2].token, updates[2], 7.0)).HasField("receipt")
        await clients[0].upload(work[0].token, contents[0], end=60)
    async with daemons.running(folder) as site:
        a, b, c = [await moved(client, site) for client in clients]
        assert (await c.report(work[2].token, digest_of(contents[2]), 7.0)).HasField("receipt")
        assert await a.query(work[0].token, digest_of(contents[0])) == 60
        await a.upload(work[0].token, contents[0], offset=60)
        assert (await a.report(work[0].token, digest_of(contents[0]), 2.0)).HasField("receipt")
        again = await b.assignment()
        assert (again.round, again.attempt) == (1, 1)
        assert 0.0 < again.training_timeout_s < 3600.0
        assert reason_name((await b.report(work[1].token)).refusal.reason) == "STALE"  # fenced by the new token
        assert (await b.deliver(again.token, updates[1], 3.0)).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")
        assert [(one.round, one.attempt) for one in await site.operator.rounds(job)] == [(1, 1)]
        exported = await site.operator.export(job)
    rule, base = build_rule(parse_job(text)), initial_model()
    accumulator = Accumulator(base.schema, rule)
    for number, weight in ((2, 7.0), (0, 2.0), (1, 3.0)):  # the order of acceptance
        accumulator.fold(updates[number], Contribution(weight))
    assert accumulator.finish(base, rule.init(base.schema.num_floating))[0].to_bytes() == exported
    assert not list((folder / "uploads").iterdir())


@pytest.mark.fault("F5")
async def test_a_receipt_after_the_commit_and_a_restart(folder: Path) -> None:
    content = update_of(initial_model(), 0).to_bytes()
    async with daemons.running(folder) as site:
        job, (client,), (work,) = await begun(site, job_file(goal=1, rounds=2), 1)
        await client.deliver(work.token, content)
        await site.operator.until(job, "version", "1")
    async with daemons.running(folder) as site:
        client = await moved(client, site)
        assert (await client.report(work.token, digest_of(content))).HasField("receipt")
        fresh = await client.assignment()
        assert (fresh.round, fresh.model.digest) == (2, (await site.operator.versions(job))[-1].model.digest)


@pytest.mark.fault("F2", "F16")
async def test_whose_deadline_struck_while_the_server_was_down_is_late(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job, (one, two), work = await begun(site, job_file(goal=2, min_fraction=0.5), 2)
        await one.deliver(work[0].token, update_of(initial_model(), 0))
    with contextlib.closing(sqlite3.connect(folder / "fedplat.sqlite")) as connection, connection:
        connection.execute("UPDATE assignments SET deadline_unix_s = deadline_unix_s - 7200")  # two hours later
    async with daemons.running(folder) as site:
        await site.operator.until(job, "job", "COMPLETED")
        late = await (await moved(two, site)).report_inline(work[1].token, update_of(initial_model(), 1).to_bytes())
        assert reason_name(late.refusal.reason) == "TRAIN_TIMEOUT"
        assert (await site.operator.versions(job))[-1].num_updates == 1


@pytest.mark.fault("F2")
async def test_an_attempt_whose_spool_is_gone_is_tried_again(folder: Path) -> None:
    update = update_of(initial_model(), 0)
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, job_file(goal=2), 2)
        await clients[0].deliver(work[0].token, update)
    for path in (folder / "uploads").iterdir():
        shutil.rmtree(path)
    async with daemons.running(folder) as site:
        ended = await site.operator.until(job, "attempt", "ABANDONED")
        assert ended.reason == f"aggregation failed: the update of {clients[0].client_id} is missing or damaged"
        clients = [await moved(client, site) for client in clients]
        work = await site.assign(clients)
        assert [one.attempt for one in work] == [2, 2]
        for client, one in zip(clients, work, strict=True):
            assert (await client.deliver(one.token, update)).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")


# --- clocks --------------------------------------------------------------------------------------------------


@pytest.mark.fault("F18")
@pytest.mark.parametrize("jump_s", [-DAY_S, DAY_S])
async def test_a_wall_clock_that_jumps_by_a_day_changes_no_deadline(folder: Path, jump_s: float) -> None:
    moved_by = [0.0]
    async with daemons.running(folder, clock=lambda: time.time() + moved_by[0]) as site:
        job, (one, two), work = await begun(site, job_file(goal=2), 2)
        moved_by[0] = jump_s
        assert (await one.deliver(work[0].token, update_of(initial_model(), 0))).HasField("receipt")
        answer = await two.heartbeat(work[1].token, 0.0)
        assert 0.0 < answer.proceed.remaining_s <= 3600.0
        assert (await two.deliver(work[1].token, update_of(initial_model(), 1))).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F18")
async def test_a_clock_that_was_set_back_while_the_server_was_down_gives_no_more_time(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job, (one, two), work = await begun(site, job_file(goal=2), 2)
        await one.deliver(work[0].token, update_of(initial_model(), 0))
    async with daemons.running(folder, clock=lambda: time.time() - DAY_S) as site:
        answer = await (await moved(two, site)).heartbeat(work[1].token, 0.0)
        assert 0.0 < answer.proceed.remaining_s <= 3600.0
        await (await moved(two, site)).deliver(work[1].token, update_of(initial_model(), 1))
        await site.operator.until(job, "job", "COMPLETED")


# --- in memory -----------------------------------------------------------------------------------------------


@pytest.mark.fault("F2")
async def test_in_memory_a_restart_costs_the_attempt_and_not_the_job(folder: Path) -> None:
    update = update_of(initial_model(), 0)
    async with daemons.running(folder) as site:
        job, (one, two), work = await begun(site, MEMORY + job_file(goal=2), 2)
        assert (await one.deliver(work[0].token, update)).HasField("receipt")
        assert list((folder / "uploads").iterdir()) == []
    async with daemons.running(folder) as site:
        ended = await site.operator.until(job, "attempt", "ABANDONED")
        assert ended.reason == "the server was restarted"
        one, two = await moved(one, site), await moved(two, site)
        late = await two.report_inline(work[1].token, update.to_bytes())
        assert reason_name(late.refusal.reason) == "ATTEMPT_ABANDONED"
        for client, again in zip((one, two), await site.assign([one, two]), strict=True):
            assert again.attempt == 2
            assert (await client.deliver(again.token, update)).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")
        assert list((folder / "uploads").iterdir()) == []


async def test_both_kinds_of_jobs_give_the_same_model(site: Site) -> None:
    models: list[Parameters] = []
    for text in (job_file("spool", goal=1), MEMORY + job_file("memory", goal=1)):
        job, (client,), (work,) = await begun(site, text, 1)
        await client.deliver(work.token, update_of(initial_model(), 1))
        await site.operator.until(job, "job", "COMPLETED")
        models.append(await site.operator.model(job))
    np.testing.assert_array_equal(models[0].buffer, models[1].buffer)


async def test_memory_is_refused_on_platforms_without_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_file, "CAN_KEEP_IN_MEMORY", False)
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.create(MEMORY + job_file())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert 'durability = "memory"' in (caught.value.details() or "")
    assert 'use "spool"' in (caught.value.details() or "")


# --- a disk that fails ---------------------------------------------------------------------------------------


def broken(monkeypatch: pytest.MonkeyPatch, *, folders: bool) -> pytest.MonkeyPatch:
    """The next sync of a file (or of a folder) in the spool fails, and none after it."""
    fsync, failed = os.fsync, list[int]()

    def fail_once(descriptor: int) -> None:
        inside = "/uploads/" in os.readlink(f"/proc/self/fd/{descriptor}")
        if inside and not failed and stat.S_ISDIR(os.fstat(descriptor).st_mode) is folders:
            failed.append(descriptor)
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_once)
    return monkeypatch


@pytest.mark.fault("F8")
async def test_an_update_that_could_not_be_synced_is_sent_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job, (client,), (work,) = await begun(site, job_file(goal=1), 1)
    content = update_of(initial_model(), 0).to_bytes()
    await client.upload(work.token, content)
    broken(monkeypatch, folders=False)
    with pytest.raises(aio.AioRpcError) as caught:
        await client.report(work.token, digest_of(content))
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert "send it again" in (caught.value.details() or "")
    assert await client.query(work.token, digest_of(content)) == 0
    assert (await client.deliver(work.token, content)).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F8")
async def test_a_spool_that_cannot_be_trusted_ends_the_attempt(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job, clients, work = await begun(site, job_file(goal=2), 2)
    content = update_of(initial_model(), 0).to_bytes()
    await clients[0].upload(work[0].token, content)
    broken(monkeypatch, folders=True)
    with pytest.raises(aio.AioRpcError) as caught:
        await clients[0].report(work[0].token, digest_of(content))
    assert caught.value.code() is grpc.StatusCode.ABORTED
    ended = await site.operator.until(job, "attempt", "ABANDONED")
    assert "the spool cannot be trusted" in ended.reason
    for client, again in zip(clients, await site.assign(clients), strict=True):
        assert again.attempt == 2
        assert (await client.deliver(again.token, content)).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
