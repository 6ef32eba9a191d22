"""The database goes away and comes back: callers are told, nothing is half done, and everything continues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

from fedplat.wire.v1 import admin_pb2, model_pb2
from fedplat_server.coordination.runner import NO_ANSWER
from fedplat_server.database.records import AttemptFilter
from fedplat_server.errors import StoreUnavailableError
from fedplat_server.rpc import serving
from support import daemons
from support.daemons import Site, digest_of, initial_model, update_of
from support.jobs import job_file

pytestmark = pytest.mark.calm("says itself what fails when")


@pytest.fixture(autouse=True)
def _short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CHECK_S", 0.02)


async def unavailable(call: Awaitable[object]) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, caught.value.details()
    assert "database" in (caught.value.details() or "")


@pytest.mark.fault("F9")
async def test_callers_get_unavailable_and_the_round_continues_afterwards(site: Site) -> None:
    job = await site.operator.start(job_file(goal=2))
    one, two = await site.fleet(2)
    tokens = [assignment.token for assignment in await site.assign([one, two])]
    updates = [update_of(initial_model(), seed) for seed in range(2)]
    digests = [digest_of(update.to_bytes()) for update in updates]
    await one.upload(tokens[0], updates[0].to_bytes())
    before = len(await _history(site, job))

    site.store.outage = True
    request = admin_pb2.JobRequest(job=job)
    for call in (
        one.report(tokens[0], digests[0]),
        two.upload(tokens[1], updates[1].to_bytes()),
        two.fail(tokens[1], model_pb2.REASON_TRAINER_ERROR),
        site.operator.jobs.PauseJob(request),
        site.operator.jobs.ListJobs(admin_pb2.ListJobsRequest()),
        site.operator.create(job_file()),
        site.enroll(),
    ):
        await unavailable(call)
    assert (await two.heartbeat(tokens[1], 0.0)).HasField("proceed")  # needs no database
    await site.back()

    assert len(await _history(site, job)) == before
    assert (await one.report(tokens[0], digests[0])).HasField("receipt")
    assert (await two.deliver(tokens[1], updates[1])).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
    assert (await site.operator.versions(job))[-1].num_updates == 2


async def _history(site: Site, job: str) -> list[object]:
    return list(await site.store.inner.jobs.list_history(job))


@pytest.mark.fault("F9")
async def test_a_deadline_that_strikes_meanwhile_is_not_forgotten(site: Site) -> None:
    more = "[deadlines]\ntraining_s = 0.3\nselection_s = 3600\nheartbeat_s = 0.1\n[retry]\nbase_s = 0.01\nmax_s = 0.01"
    job = await site.operator.start(job_file(goal=1, more=more))
    client = await site.enroll()
    token = (await client.assignment()).token
    failed = asyncio.Event()

    async def away() -> None:
        failed.set()
        raise StoreUnavailableError("away")

    site.store.before["save"] = away
    await failed.wait()
    assert (await client.heartbeat(token, 0.0)).proceed.remaining_s == 0.0
    del site.store.before["save"]
    assert await client.stop_reason(token) == "TRAIN_TIMEOUT"
    await site.operator.until(job, "attempt", "ABANDONED")
    fresh = await client.assignment()
    assert fresh.attempt == 2


@pytest.mark.fault("F9")
async def test_a_version_is_committed_once_the_database_is_back(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token
    failed = asyncio.Event()

    async def away_for_the_version() -> None:
        if (await site.store.inner.jobs.list_attempts(AttemptFilter(job)))[-1].attempt.phase == "COMMITTING":
            failed.set()
            raise StoreUnavailableError("away")

    site.store.before["save"] = away_for_the_version
    with capture_logs() as lines:
        await client.deliver(token, update_of(initial_model(), 0))
        for _ in range(3):
            failed.clear()
            await failed.wait()
    assert len(await site.operator.versions(job)) == 1
    assert len([line for line in lines if line["event"] == NO_ANSWER]) == 1, "retries come twice a second"
    watch = site.operator.jobs.WatchJob(admin_pb2.WatchJobRequest(job=job, progress_every_s=0.01))
    told = await anext(event async for event in aiter(watch) if event.entity == "progress")
    assert told.reason == f"nothing can be stored: {NO_ANSWER}; see fedplat status"
    watch.cancel()
    del site.store.before["save"]
    await site.operator.until(job, "job", "COMPLETED")
    assert len(await site.operator.versions(job)) == 2


@pytest.mark.fault("F9")
async def test_check_ins_during_an_outage_leave_no_ghost_in_the_room(site: Site) -> None:
    await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    await client.refusal(labels={"region": "eu"}, trainers=("other",))
    site.store.outage = True
    await unavailable(client.check_in(labels={"region": "eu"}))
    await unavailable(client.check_in(labels={"region": "us"}))  # changed labels have to be stored first
    await site.back()
    await site.waiting(0)
    assert (await client.assignment()).attempt == 1


@pytest.mark.fault("F9", "F36")
async def test_a_daemon_that_stops_during_an_outage_stops(folder: Path) -> None:
    async with daemons.running(folder, grace_s=0.2) as site:
        job = await site.operator.start(job_file(goal=1))
        client = await site.enroll(key="the-one-client")
        token = (await client.assignment()).token
        await client.deliver(token, update_of(initial_model(), 0))
        site.store.outage = True
    async with daemons.running(folder) as site:
        shown = await site.operator.show(job)
        assert shown.model.version in (0, 1)
        again = await site.enroll(key="the-one-client")
        answer = await again.report(token, digest_of(update_of(initial_model(), 0).to_bytes()))
        assert answer.HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F9")
async def test_readiness_follows_the_database_and_liveness_does_not(site: Site) -> None:
    serving, away = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    names = ("", "fedplat.wire.v1.Fleet", "fedplat.wire.v1.Jobs")
    assert [await site.readiness(name) for name in (*names, "liveness")] == [serving] * 4
    for _ in range(2):
        site.store.outage = True

        async def noticed() -> bool:
            return await site.readiness() == away

        await daemons.until(noticed, "a server that is not ready")  # before any client has called
        assert [await site.readiness(name) for name in names] == [away] * 3
        assert await site.readiness("liveness") == serving
        await site.back()
        assert [await site.readiness(name) for name in names] == [serving] * 3


@pytest.mark.fault("F10")
async def test_a_report_whose_reply_was_lost_gets_its_receipt(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token
    update = update_of(initial_model(), 0)
    await client.upload(token, update.to_bytes())
    lost: list[bool] = []

    async def lose() -> None:
        if not lost:
            lost.append(True)
            raise StoreUnavailableError("the connection broke")

    site.store.after["save"] = lose
    await unavailable(client.report(token, digest_of(update.to_bytes())))
    await site.back()
    assert (await client.report(token, digest_of(update.to_bytes()))).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
    assert [one.attempt for one in await site.operator.rounds(job)] == [1]
