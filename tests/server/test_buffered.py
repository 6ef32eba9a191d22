"""Jobs with a buffer over the wire: which updates are stale, their weights, and what a restart keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, reason_name, update_of
from support.jobs import job_file

FEDBUFF = '[aggregation]\nrule = "fedbuff"\nlearning_rate = 0.5\n[updates]\nweighting = "uniform"\n'


def text(concurrency: int = 3, goal: int = 2, rounds: int = 2, more: str = FEDBUFF, mode: str = "") -> str:
    table = f'[mode]\nkind = "buffered"\nconcurrency = {concurrency}\n{mode}\n'
    return job_file("async", rounds=rounds, goal=goal, more=table + more)


def fedbuff(base: np.ndarray, updates: list[np.ndarray], staleness: list[int]) -> np.ndarray:
    """The next version by Nguyen et al. 2022, Algorithm 1, with s(tau) = 1 / sqrt(1 + tau) and a step of 0.5."""
    total = sum(np.float32((1 + tau) ** -0.5) * update for update, tau in zip(updates, staleness, strict=True))
    return base + 0.5 * total / len(updates)


async def clean(site: Site) -> None:
    report = await verify(f"sqlite:///{site.folder / 'fedplat.sqlite'}", site.folder, live=True)
    assert report.findings == []


async def moved(client: RawClient, site: Site) -> RawClient:
    """The same client, connected to another server."""
    there = client.over(site.channel)
    await there.open_session()
    return there


async def begun(site: Site, job: str, count: int = 3) -> tuple[str, list[RawClient], list[fleet_pb2.Assignment]]:
    name = await site.operator.start(job)
    clients = await site.fleet(count)
    return name, clients, await site.assign(clients)


async def test_a_slow_client_is_merged_into_a_later_version(site: Site) -> None:
    job, (a, b, slow), work = await begun(site, text())
    base, deltas = initial_model(), [update_of(initial_model(), seed) for seed in range(4)]
    await a.deliver(work[0].token, deltas[0])
    await b.deliver(work[1].token, deltas[1])
    await site.operator.until(job, "version", "1")
    fresh = await a.assignment()
    assert (fresh.round, fresh.model.version) == (2, 1)
    await clean(site)
    response = await slow.deliver(work[2].token, deltas[2])
    assert (response.receipt.round, response.receipt.attempt) == (1, 1)
    await a.deliver(fresh.token, deltas[3])
    await site.operator.until(job, "job", "COMPLETED")
    first = fedbuff(base.to_vector(), [deltas[0].to_vector(), deltas[1].to_vector()], [0, 0])
    second = fedbuff(first, [deltas[2].to_vector(), deltas[3].to_vector()], [1, 0])
    np.testing.assert_allclose((await site.operator.model(job)).to_vector(), second, rtol=1e-6)
    rounds = await site.operator.rounds(job)
    assert [(one.reported, one.mean_staleness, one.max_staleness) for one in rounds] == [(2, 0.0, 0), (2, 0.5, 1)]
    again = await slow.report(work[2].token, digest_of(deltas[2].to_bytes()))
    assert again.receipt.digest == digest_of(deltas[2].to_bytes())
    await clean(site)


async def test_fedasync_moves_towards_the_clients_model(site: Site) -> None:
    """Xie et al. 2019, Algorithm 1: a stale update is the step from the latest version to the client's model."""
    more = '[aggregation]\nrule = "fedasync"\nmixing = 0.5\n[updates]\nweighting = "uniform"\n'
    job, (quick, slow), work = await begun(site, text(concurrency=2, goal=1, more=more), 2)
    x, deltas = initial_model().to_vector(), [update_of(initial_model(), seed) for seed in range(2)]
    await quick.deliver(work[0].token, deltas[0])
    await site.operator.until(job, "version", "1")
    await slow.deliver(work[1].token, deltas[1])
    await site.operator.until(job, "job", "COMPLETED")
    first = 0.5 * x + 0.5 * (x + deltas[0].to_vector())
    mixing = 0.5 * 2**-0.5
    second = (1 - mixing) * first + mixing * (x + deltas[1].to_vector())
    np.testing.assert_allclose((await site.operator.model(job)).to_vector(), second, rtol=1e-5, atol=1e-6)


async def test_a_client_that_is_too_far_behind_is_told_at_once(site: Site) -> None:
    job, (a, b, slow), work = await begun(site, text(mode="max_staleness = 0", rounds=3))
    content = update_of(initial_model(), 0).to_bytes()
    beating = slow.heartbeat(work[2].token)
    await a.deliver(work[0].token, content)
    await b.deliver(work[1].token, content)
    assert reason_name((await beating).stop.reason) == "TOO_STALE"
    refused = await slow.report_inline(work[2].token, content)
    assert reason_name(refused.refusal.reason) == "TOO_STALE"
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    assert (await site.operator.reasons(job))[slow.client_id] == "LATE TOO_STALE"
    await clean(site)


async def test_a_restarted_client_gets_the_version_that_it_began_with(site: Site) -> None:
    """There is a newer version by then; the old one can still be downloaded, and an update of it is accepted."""
    job, (a, b, slow), work = await begun(site, text())
    for client, one in ((a, work[0]), (b, work[1])):
        await client.deliver(one.token, update_of(initial_model(), 1))
    await site.operator.until(job, "version", "1")
    again = await slow.assignment()
    assert (again.round, again.model.version, again.model.digest) == (1, 0, work[2].model.digest)
    assert again.model_bytes == await slow.download(again.model.digest) == initial_model().to_bytes()
    assert (await slow.deliver(again.token, update_of(initial_model(), 2))).HasField("receipt")
    await clean(site)


@pytest.mark.fault("F2")
async def test_a_half_full_buffer_and_who_works_outlive_the_server(folder: Path) -> None:
    deltas = [update_of(initial_model(), seed) for seed in range(4)]
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, text())
        await clients[0].deliver(work[0].token, deltas[0])
        await clients[1].deliver(work[1].token, deltas[1])
        await site.operator.until(job, "version", "1")
        fresh = await clients[0].assignment()
        await clients[2].deliver(work[2].token, deltas[2])  # one version old, in the folder of the first attempt
        await clients[0].upload(fresh.token, deltas[3].to_bytes(), end=60)
        await clean(site)
    async with daemons.running(folder) as site:
        a, _, slow = [await moved(client, site) for client in clients]
        await clean(site)
        assert (await slow.report(work[2].token, digest_of(deltas[2].to_bytes()))).HasField("receipt")
        await a.upload(fresh.token, deltas[3].to_bytes(), offset=60)
        assert (await a.report(fresh.token, digest_of(deltas[3].to_bytes()))).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")
        model = await site.operator.model(job)
    first = fedbuff(initial_model().to_vector(), [deltas[0].to_vector(), deltas[1].to_vector()], [0, 0])
    second = fedbuff(first, [deltas[2].to_vector(), deltas[3].to_vector()], [1, 0])
    np.testing.assert_allclose(model.to_vector(), second, rtol=1e-6)
    assert not list((folder / "uploads").iterdir())


async def test_updates_in_memory_are_lost_and_working_clients_continue(folder: Path) -> None:
    content = update_of(initial_model(), 0).to_bytes()
    async with daemons.running(folder) as site:
        job, clients, work = await begun(site, 'durability = "memory"\n' + text(rounds=1))
        await clients[0].deliver(work[0].token, content)
    async with daemons.running(folder) as site:
        a, b, c = [await moved(client, site) for client in clients]
        lost = await a.report(work[0].token, digest_of(content))
        assert reason_name(lost.refusal.reason) == "ATTEMPT_ABANDONED"
        for client, one in ((b, work[1]), (c, work[2])):
            assert (await client.deliver(one.token, content)).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")
        assert [(one.attempt, one.reported) for one in await site.operator.rounds(job)] == [(1, 2)]


async def test_what_was_merged_leaves_the_spool_while_others_of_its_attempt_work(site: Site) -> None:
    job, (a, b, _), work = await begun(site, text())
    for client, one in ((a, work[0]), (b, work[1])):
        await client.deliver(one.token, update_of(initial_model(), 1))
    await site.operator.until(job, "version", "1")

    async def empty() -> bool:
        return not [path for path in (site.folder / "uploads").rglob("*") if path.is_file()]

    await daemons.until(empty, "an empty spool")
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    await site.operator.until(job, "job", "CANCELLED")


async def test_a_pause_stops_who_works_and_a_revoked_client_leaves_the_rest_alone(site: Site) -> None:
    job, (a, b, c), work = await begun(site, text())
    await site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=a.client_id))
    beating = b.heartbeat(work[1].token)
    await c.deliver(work[2].token, update_of(initial_model(), 1))
    await site.operator.jobs.PauseJob(admin_pb2.JobRequest(job=job))
    assert reason_name((await beating).stop.reason) == "JOB_PAUSED"
    await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))
    for client in (b, c):
        fresh = await client.assignment()
        await client.deliver(fresh.token, update_of(initial_model(), 2))
    await site.operator.until(job, "version", "1")
    await clean(site)


async def test_clients_train_on_while_a_version_is_evaluated(site: Site) -> None:
    more = FEDBUFF + '[evaluation.clients]\nevaluator = "toy"\ngoal = 1\n'
    job, (a, b, slow), work = await begun(site, text(more=more))
    for client, one in ((a, work[0]), (b, work[1])):
        await client.deliver(one.token, update_of(initial_model(), 1))
    task = await a.assignment(evaluators=("toy",))
    assert (task.task, task.model.version) == (fleet_pb2.TASK_EVALUATE, 1)
    assert (await slow.deliver(work[2].token, update_of(initial_model(), 2))).HasField("receipt")
    assert (await a.report(task.token, metrics={"loss": 1.0})).HasField("receipt")
    fresh = await b.assignment()
    assert (fresh.task, fresh.round) == (fleet_pb2.TASK_TRAIN, 2)
    await b.deliver(fresh.token, update_of(initial_model(), 3))
    await site.operator.until(job, "version", "2")
    kinds = [(one.kind, one.max_staleness) for one in await site.operator.rounds(job)]
    assert kinds[:3] == [(admin_pb2.ATTEMPT_KIND_TRAIN, 0), (admin_pb2.ATTEMPT_KIND_EVALUATE, 0), (kinds[0][0], 1)]
    await clean(site)


async def test_encoded_steps_are_offered_from_the_version_before_only(site: Site) -> None:
    """A client that begins two versions late gets the whole model, and the delta of its own version."""
    rng = np.random.default_rng(0)
    base = Parameters.from_arrays({"weight": rng.normal(size=(200, 100)).astype("f4")})
    more = FEDBUFF + '[compression]\ndownlink = {codec = "eden"}\n'
    job = await site.operator.start(text(more=more, rounds=3), base)
    a, b, slow = clients = await site.fleet(3)
    work = await site.assign(clients)
    for client, one in ((a, work[0]), (b, work[1])):
        await client.deliver(one.token, update_of(base, 1))
    await site.operator.until(job, "version", "1")
    fresh = await a.assignment()
    assert (fresh.model.version, fresh.delta.base_digest) == (1, work[0].model.digest)
    again = await slow.assignment()
    assert (again.model.digest, again.delta.digest) == (work[0].model.digest, "")
    await clean(site)
