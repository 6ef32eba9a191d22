"""The progress of clients: their heartbeats carry it, operators see it."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fedplat.rounds.states import AttemptPhase
from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination.progress import PhaseProgress, ProgressSummary, ProgressTracker
from support import daemons
from support.daemons import Site, initial_model, update_of
from support.jobs import job_file, write_job
from support.rounds.driver import collecting
from support.rounds.secure_driver import SecureDriver, advertising


async def progress_of(site: Site, job: str) -> admin_pb2.AttemptProgress:
    return (await site.operator.show(job)).current.progress


async def test_operators_see_the_progress_of_the_open_attempt(site: Site) -> None:
    job = await site.operator.start(job_file(goal=3))
    clients = await site.fleet(3)
    work = await site.assign(clients)
    assert await progress_of(site, job) == admin_pb2.AttemptProgress(num_training=3)
    for client, assignment, fraction in zip(clients, work, (0.5, 0.25, 1.0), strict=True):
        await client.heartbeat(assignment.token, 0.0, progress=fraction)
    expected = admin_pb2.AttemptProgress(
        num_training=3, num_known=3, median=0.5, minimum=0.25, slowest_client_id=clients[1].client_id
    )
    assert await progress_of(site, job) == expected
    (attempt,) = await site.operator.rounds(job)
    assert attempt.progress == expected
    listed = (await site.operator.clients.ListClients(admin_pb2.ListClientsRequest())).clients
    assert {one.client_id: one.progress for one in listed} == {
        client.client_id: fraction for client, fraction in zip(clients, (0.5, 0.25, 1.0), strict=True)
    }

    await clients[1].upload(work[1].token, update_of(initial_model(), 1).to_bytes(), end=10)
    assert (await clients[1].heartbeat(work[1].token, 0.0)).proceed.uploading
    assert not (await clients[0].heartbeat(work[0].token, 0.0)).proceed.uploading
    await clients[2].deliver(work[2].token, update_of(initial_model(), 2))
    assert await progress_of(site, job) == admin_pb2.AttemptProgress(
        num_training=1,
        num_uploading=1,
        num_known=1,
        median=0.5,
        minimum=0.5,
        slowest_client_id=clients[0].client_id,
    )
    await site.operator.jobs.PauseJob(admin_pb2.JobRequest(job=job))
    assert not (await site.operator.show(job)).current.HasField("progress")
    listed = (await site.operator.clients.ListClients(admin_pb2.ListClientsRequest())).clients
    assert not any(one.HasField("progress") for one in listed)


async def test_operators_see_for_whom_an_attempt_waits_and_until_when(site: Site) -> None:
    job = await site.operator.start(job_file(goal=2))
    waits = (await site.operator.show(job)).current.waiting
    assert (list(waits.client_ids), waits.until_unix_s > 0.0) == ([], True)
    clients = await site.fleet(2)
    work = await site.assign(clients)
    waits = (await site.operator.show(job)).current.waiting
    assert sorted(waits.client_ids) == sorted(client.client_id for client in clients)
    assert waits.until_unix_s > 0.0
    assert not waits.silent_client_ids
    await clients[0].deliver(work[0].token, update_of(initial_model(), 2))
    waits = (await site.operator.show(job)).current.waiting
    assert list(waits.client_ids) == [clients[1].client_id]
    await site.operator.jobs.PauseJob(admin_pb2.JobRequest(job=job))
    assert not (await site.operator.show(job)).current.HasField("waiting")


async def test_operators_see_a_client_whose_trainer_does_not_return(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    (client,) = await site.fleet(1)
    (assignment,) = await site.assign([client])

    async def shown() -> tuple[str, str]:
        (found,) = (await site.operator.clients.ListClients(admin_pb2.ListClientsRequest())).clients
        return found.state, found.job_id

    await site.operator.jobs.PauseJob(admin_pb2.JobRequest(job=job))
    assert await shown() == ("away", "")
    assert (await client.heartbeat(assignment.token, 0.0)).HasField("stop")
    assert await shown() == ("away", job)  # it is there, in its trainer
    await client.refusal()
    assert await shown() == ("away", "")
    tracker = ProgressTracker()
    tracker.record_overdue("c-1", job, until=10.0)
    assert (tracker.find_overdue("c-1", 9.0), tracker.find_overdue("c-1", 10.0)) == (job, "")


async def test_a_client_that_was_restarted_begins_anew(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    first = await client.assignment()
    await client.heartbeat(first.token, 0.0, progress=0.75)
    second = await client.assignment()
    assert await progress_of(site, job) == admin_pb2.AttemptProgress(num_training=1)
    await client.heartbeat(second.token, 0.0, progress=0.0)
    assert (await progress_of(site, job)).num_known == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.01, 1.01])
async def test_only_fractions_are_taken(site: Site, bad: float) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token
    with pytest.raises(aio.AioRpcError) as caught:
        await client.heartbeat(token, 0.0, progress=bad)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected a fraction between 0 and 1" in (caught.value.details() or "")
    assert (await progress_of(site, job)).num_known == 0


@pytest.mark.calm("a watch may be cut")
@pytest.mark.fault("F2")
async def test_after_a_restart_progress_is_unknown_until_the_next_heartbeat(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file(goal=1))
        client = await site.enroll()
        token = (await client.assignment()).token
        await client.heartbeat(token, 0.0, progress=0.75)
    async with daemons.running(folder) as site:
        assert await progress_of(site, job) == admin_pb2.AttemptProgress(num_training=1)
        client = client.over(site.channel)
        await client.open_session()
        await client.heartbeat(token, 0.0, progress=0.8)
        assert (await progress_of(site, job)).minimum == 0.8


@pytest.mark.calm("a watch may be cut")
async def test_a_watch_that_asks_for_it_has_events_about_progress(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    token = (await client.assignment()).token
    request = admin_pb2.WatchJobRequest(job=job, progress_every_s=0.01)
    seen: list[admin_pb2.JobEvent] = []
    fractions = iter((0.25, 0.5))
    async with contextlib.aclosing(aiter_of(site, request)) as events:
        async for event in events:
            seen.append(event)
            if event.entity != "progress":
                continue
            if (fraction := next(fractions, None)) is None:
                break
            await client.heartbeat(token, 0.0, progress=fraction)
    told = [event for event in seen if event.entity == "progress"]
    assert [event.progress.minimum for event in told] == [0.0, 0.25, 0.5]
    assert [event.progress.num_known for event in told] == [0, 1, 1]
    assert {(event.round, event.attempt, event.kind) for event in told} == {(1, 1, admin_pb2.ATTEMPT_KIND_TRAIN)}
    history = [event.sequence for event in seen if event.entity != "progress"]
    assert [event.sequence for event in told] == [history[-1]] * 3
    assert history == sorted(set(history))


@pytest.mark.calm("a watch may be cut")
async def test_a_watch_states_why_an_attempt_waits_and_operators_see_the_trainers(site: Site) -> None:
    job = await site.operator.start(write_job(trainer="lineer"))
    client = await site.enroll()
    waiting = client.check_in(wait_s=20.0)
    await site.waiting(1)
    request = admin_pb2.WatchJobRequest(job=job, progress_every_s=0.01)
    async with contextlib.aclosing(aiter_of(site, request)) as events:
        told = await anext(event async for event in events if event.entity == "progress")
    assert told.reason == "waits for clients: 0 of 1 can be drawn now; 1 more do not have the trainer lineer, but toy"
    shown = await site.operator.clients.ShowClient(admin_pb2.ShowClientRequest(client_id=client.client_id))
    assert list(shown.trainers) == ["toy"]
    waiting.cancel()


@pytest.mark.calm("a watch may be cut")
async def test_a_watch_of_the_past_ends_while_the_job_runs(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1))
    client = await site.enroll()
    await client.assignment()
    request = admin_pb2.WatchJobRequest(job=job, until_now=True)
    async with contextlib.aclosing(aiter_of(site, request)) as events:
        seen = [event async for event in events]
    assert seen[0].entity == "job"
    assert client.client_id in {event.client_id for event in seen}
    request.after_sequence = seen[0].sequence
    async with contextlib.aclosing(aiter_of(site, request)) as events:
        assert [event.sequence async for event in events] == [event.sequence for event in seen[1:]]


async def aiter_of(site: Site, request: admin_pb2.WatchJobRequest):
    call = site.operator.jobs.WatchJob(request)
    try:
        async for event in call:
            yield event
    finally:
        call.cancel()


def test_the_slowest_of_equals_is_the_one_that_began_first() -> None:
    driver, tracker = collecting(3, goal=3), ProgressTracker()
    assert tracker.summarize(driver.job, driver.attempt) == ProgressSummary(3, 0)
    for client_id, fraction in (("c2", 0.25), ("c1", 0.25), ("c0", 0.75)):
        tracker.record(driver.attempt.assignments[client_id], fraction)
    assert tracker.summarize(driver.job, driver.attempt) == ProgressSummary(3, 0, 3, 0.25, 0.25, "c1")


def test_what_has_ended_is_forgotten() -> None:
    driver, tracker = collecting(2, goal=2), ProgressTracker()
    before = driver.attempt.assignments
    for assignment in before.values():
        tracker.record(assignment, 0.5)
    tracker.on_stored(driver.report("c0").changes)
    assert (tracker.get(before["c0"]), tracker.get(before["c1"])) == (None, 0.5)
    tracker.on_stored(driver.report("c1").changes)
    assert tracker.get(before["c1"]) is None
    assert tracker.summarize(driver.job, driver.attempt) is None


def _step(driver: SecureDriver) -> PhaseProgress | None:
    summary = ProgressTracker().summarize(driver.job, driver.attempt)
    return summary.step if summary is not None else None


def test_the_progress_of_each_step_of_a_secure_aggregation():
    """Also of the last two, in which no client has more work."""
    driver = advertising(5, goal=5, options={"confirm": True})
    driver.advertise(*driver.names("TRAINING")[:2])
    assert _step(driver) == PhaseProgress(AttemptPhase.ADVERTISING, 2, 5)
    driver.advertise(*driver.names("TRAINING")[:3])
    driver.share(*driver.names("ADVERTISED")[:1])
    assert _step(driver) == PhaseProgress(AttemptPhase.SHARING, 1, 5)
    driver.share()
    driver.upload_masked(*driver.names("SHARED")[:2])
    driver.report_masked(*driver.names("UPLOADING")[:1])
    assert ProgressTracker().summarize(driver.job, driver.attempt) == ProgressSummary(
        0, 1, step=PhaseProgress(AttemptPhase.COLLECTING, 1, 5)
    )
    driver.report_masked()
    driver.confirm(*driver.names("REPORTED")[:4])
    assert _step(driver) == PhaseProgress(AttemptPhase.CONFIRMING, 4, 5)
    driver.confirm()
    assert _step(driver) == PhaseProgress(AttemptPhase.UNMASKING, 0, 5)
    driver.answer(*driver.names("REPORTED")[:1])
    assert _step(driver) == PhaseProgress(AttemptPhase.UNMASKING, 1, 5)
    driver.answer()
    assert driver.attempt.phase is AttemptPhase.COMMITTING
    assert _step(driver) is None
