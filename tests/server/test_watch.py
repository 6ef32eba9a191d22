"""Watching a job: everything, once, in order, to the end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio

from fedplat.wire.v1 import admin_pb2
from fedplat_server.rpc import job_rounds
from support import daemons
from support.daemons import Site, initial_model, update_of
from support.jobs import job_file


async def train(site: Site, rounds: int) -> None:
    client = await site.enroll()
    for _ in range(rounds):
        await client.deliver((await client.assignment()).token, update_of(initial_model(), 0))


async def test_every_watcher_sees_the_whole_history_in_order(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, rounds=3))
    watchers = [asyncio.create_task(site.operator.events(job)) for _ in range(3)]
    late_watcher = asyncio.create_task(site.operator.until(job, "version", "2"))
    await train(site, 3)
    histories = await asyncio.gather(*watchers)
    await late_watcher
    assert histories[0] == histories[1] == histories[2] == await site.operator.events(job)
    sequences = [event.sequence for event in histories[0]]
    assert sequences == sorted(set(sequences))
    assert [event.to_state for event in histories[0] if event.entity == "version"] == ["1", "2", "3"]
    assert [event.to_state for event in histories[0] if event.entity == "job"] == ["DRAFT", "RUNNING", "COMPLETED"]
    middle = sequences[len(sequences) // 2]
    assert [event.sequence for event in await site.operator.events(job, middle)] == [s for s in sequences if s > middle]
    assert await site.operator.events(job, 10**9) == []


async def test_a_watch_of_new_events_skips_those_that_are_stored(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, rounds=3))
    await train(site, 1)
    before = (await site.operator.until(job, "version", "1")).sequence
    request = admin_pb2.WatchJobRequest(job=job, only_new=True)
    events = asyncio.ensure_future(anext(aiter(site.operator.jobs.WatchJob(request))))
    client = await site.enroll()
    while not events.done():  # the watch may begin after some of these
        await client.deliver((await client.assignment()).token, update_of(initial_model(), 0))
    assert (await events).sequence > before
    request.after_sequence = 1
    with pytest.raises(aio.AioRpcError, match="exclude each other"):
        await anext(aiter(site.operator.jobs.WatchJob(request)))


async def test_ends_after_the_last_score(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scorer.py").write_text("def score(parameters):\n    return {'size': len(parameters)}\n")
    scorers = {"sizes": f"{tmp_path / 'scorer.py'}:score"}
    async with daemons.running(folder, evaluators=scorers) as site:
        job = await site.operator.start(job_file(goal=1, rounds=2, more='[evaluation]\nserver = "sizes"'))
        watcher = asyncio.create_task(site.operator.events(job))
        await train(site, 2)
        history = await watcher
        scores = [event for event in history if event.metrics and event.entity == "version"]
        assert [(event.round, dict(event.metrics)) for event in scores] == [(1, {"size": 2.0}), (2, {"size": 2.0})]
        rounds = await site.operator.rounds(job)
        assert [dict(one.server_metrics) for one in rounds] == [{"size": 2.0}] * 2
        assert dict((await site.operator.versions(job))[-1].metrics) == {"size": 2.0}


async def test_a_server_that_stops_does_not_look_like_a_job_that_has_ended(folder: Path) -> None:
    async with daemons.running(folder) as site:
        job = await site.operator.start(job_file())
        watcher = asyncio.create_task(site.operator.events(job))
        await site.operator.until(job, "job", "RUNNING")
        site.daemon.stop()
        with pytest.raises(aio.AioRpcError) as caught:
            await watcher
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_watchers_that_go_away_are_forgotten(site: Site) -> None:
    job = await site.operator.start(job_file())
    for _ in range(5):
        await site.operator.until(job, "job", "RUNNING")
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.events("no such job")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    assert (await site.operator.events(job))[-1].to_state == "CANCELLED"


async def test_a_long_history_comes_in_parts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    history = site.store.inner.jobs.list_history
    monkeypatch.setattr(job_rounds, "HISTORY_PAGE", 3)
    job = await site.operator.start(job_file(goal=1, rounds=3))
    await train(site, 3)
    assert len(await site.operator.events(job)) == len(await history(job)) > 20


@pytest.mark.calm
async def test_a_watcher_reads_the_database_once_for_each_part(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    job = await site.operator.start(job_file(goal=1, rounds=1))
    await train(site, 1)
    await site.operator.until(job, "job", "COMPLETED")
    before = site.store.calls["list_history"]
    num_events = len(await site.operator.events(job))
    assert site.store.calls["list_history"] == before + 1
    monkeypatch.setattr(job_rounds, "HISTORY_PAGE", num_events - 1)
    assert len(await site.operator.events(job)) == num_events
    assert site.store.calls["list_history"] == before + 3
