"""Private jobs over the real server: what is released is the clipped sum with noise, over a constant."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from fedplat.model import Parameters
from fedplat.privacy import Charge, Mechanism, accounting
from fedplat.wire.v1 import admin_pb2, model_pb2
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import RawClient, Site
from support.deadlines import DeadlineClock
from support.jobs import job_file
from support.ledgers import StoredRelease, list_releases

CLIP = 2.0
GOAL = 4
LITTLE = 1e-3
"""A noise multiplier for tests that look at the values under the noise."""
BOUND = 9.0
"""No sample of the noise is larger, in standard deviations."""
SIZE = 9


def private(noise: float = LITTLE, rounds: int = 1, privacy: str = "") -> str:
    tables = (
        f'[updates]\nweighting = "examples"\nmax_examples = 10.0\nclip_norm = {CLIP}\n'
        f'[privacy]\nparticipation = "fixed"\ndelta = 1e-6\nnoise_multiplier = {noise}\n{privacy}\n'
    )
    return job_file("private", rounds, GOAL, more=tables, close="deadline")


def base() -> Parameters:
    arrays = {"weight": np.arange(8, dtype=np.float32).reshape(2, 4), "bias": np.ones(1, "f4"), "steps": np.array([7])}
    return Parameters.from_arrays(arrays)


def update(seed: int, norm: float) -> Parameters:
    """An update of a given L2 norm, whose integers are nonsense."""
    values = np.random.default_rng(seed).normal(size=SIZE)
    values *= norm / np.linalg.norm(values)
    arrays = {"weight": values[:8].astype("f4").reshape(2, 4), "bias": values[8:].astype("f4")}
    return Parameters.from_arrays({**arrays, "steps": np.array([10**9 + seed])})


def clipped(update: Parameters) -> np.ndarray[Any, Any]:
    values = update.to_vector().astype(float)
    return values * min(1.0, CLIP / max(float(np.linalg.norm(values)), 1e-30))


def noise_of(model: Parameters, updates: list[tuple[Parameters, float]], noise: float = LITTLE) -> float:
    """The largest noise in a model of these updates and weights, in units of its standard deviation."""
    total = sum((clipped(one) * weight for one, weight in updates), np.zeros(SIZE))
    rest = (model.to_vector().astype(float) - base().to_vector()) * GOAL - total
    return float(np.abs(rest).max()) / (noise * CLIP)


async def start(site: Site, text: str) -> str:
    return await site.operator.start(text, base())


async def ledger(site: Site, job: str) -> list[StoredRelease]:
    return await list_releases(site.store.inner, job)


async def reopened(site: Site, clients: list[RawClient]) -> list[RawClient]:
    """The same clients, with new sessions at a restarted daemon."""
    again = [client.over(site.channel) for client in clients]
    for client in again:
        await client.open_session()
    return again


@pytest.mark.fault("F16")
async def test_an_attempt_commits_at_its_deadline_over_a_constant(folder: Path) -> None:
    """One client of four fails, and one is late: the sum is smaller, and the divisor is the same."""
    sent = [(update(0, 0.5), 0.3), (update(1, 50.0), 1.0)]
    async with daemons.running(folder) as site:
        job, clients = await start(site, private()), await site.fleet(GOAL)
        work = await site.assign(clients)
        for client, one, (content, weight) in zip(clients, work, sent, strict=False):
            await client.deliver(one.token, content, 1000.0 if weight == 1.0 else 10 * weight)
        await clients[2].fail(work[2].token, model_pb2.REASON_TRAINER_ERROR, "no power")
        assert await ledger(site, job) == []
    async with daemons.running(folder, clock=lambda: time.time() + 4000.0) as site:
        clients = await reopened(site, clients)
        await site.operator.until(job, "job", "COMPLETED")
        late = await clients[3].report(work[3].token, "0" * 64)
        assert daemons.reason_name(late.refusal.reason) == "TRAIN_TIMEOUT"
        model = await site.operator.model(job)
        assert 0 < noise_of(model, sent) < BOUND
        assert model["steps"] == base()["steps"]
        (row,) = await ledger(site, job)
        assert (row.version, row.round, row.mechanism) == (1, 1, Mechanism("fixed", LITTLE))
        version = (await site.operator.versions(job))[-1]
        assert (version.num_updates, version.total_weight) == (2, 0.0)
    assert (await verify(f"sqlite:///{folder / 'fedplat.sqlite'}", folder)).findings == []


async def test_noise_alone_is_a_release(site: Site) -> None:
    job, clients = await start(site, private(noise=3.0)), await site.fleet(GOAL)
    for client, one in zip(clients, await site.assign(clients), strict=True):
        await client.fail(one.token, model_pb2.REASON_TRAINER_ERROR, "no power")
    await site.operator.until(job, "job", "COMPLETED")
    assert 0 < noise_of(await site.operator.model(job), [], 3.0) < BOUND
    assert len(await ledger(site, job)) == 1
    assert (await site.operator.versions(job))[-1].num_updates == 0


@pytest.mark.fault("F12", "F24")
async def test_zeros_nonsense_and_duplicates(site: Site) -> None:
    """NaN is refused, zeros and integers are harmless, and a repeated report counts once."""
    job, clients = await start(site, private()), await site.fleet(GOAL)
    work = await site.assign(clients)
    zeros, other = Parameters.zeros(base().schema), update(3, 1.0)
    broken = update(4, 1.0)
    broken["bias"].fill(np.nan)
    refused = await clients[0].deliver(work[0].token, broken)
    assert daemons.reason_name(refused.refusal.reason) == "REJECTED_NONFINITE"
    assert (await clients[1].deliver(work[1].token, zeros, 10.0)).HasField("receipt")
    first = await clients[2].deliver(work[2].token, other, 10.0)
    assert first == await clients[2].report(work[2].token, daemons.digest_of(other.to_bytes()), 10.0)
    assert first.HasField("receipt")
    far = update(5, 1e30)
    assert (await clients[3].deliver(work[3].token, far, 10.0)).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
    model = await site.operator.model(job)
    assert 0 < noise_of(model, [(other, 1.0), (far, 1.0)]) < BOUND
    assert model["steps"] == base()["steps"]
    assert first == await clients[2].report(work[2].token, daemons.digest_of(other.to_bytes()), 10.0)
    assert len(await ledger(site, job)) == 1


async def test_a_job_pauses_at_its_budget(site: Site) -> None:
    job = await start(site, private(noise=5.0, rounds=5, privacy="max_releases = 2\nepsilon = 3.0"))
    clients = await site.fleet(GOAL)
    for round_ in (1, 2):
        for client, one in zip(clients, await site.assign(clients), strict=True):
            await client.deliver(one.token, update(round_, 1.0))
    await site.operator.until(job, "job", "PAUSED")
    words = (
        "its privacy budget (epsilon = 3, delta = 1e-06) is spent: round 3 would exceed it; the last version stays "
        "available"
    )
    shown = await site.operator.show(job)
    assert (shown.round, shown.reason) == (2, words)
    with pytest.raises(aio.AioRpcError) as caught:
        await site.operator.jobs.ResumeJob(admin_pb2.JobRequest(job=job))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert (caught.value.details() or "").endswith(f"cannot resume: {words}")
    (found,) = (await site.operator.privacy.ShowPrivacy(admin_pb2.ShowPrivacyRequest(job=job))).jobs
    released = [Charge(Mechanism("fixed", 5.0), 2)]
    assert (found.released, found.adjacency, found.participation) == (found.planned, "zero-out", "fixed")
    assert found.released.epsilon == accounting.epsilon(released, 1e-6)
    assert found.released.epsilon_rdp == accounting.epsilon_rdp(released, 1e-6)
    assert found.released.epsilon < found.released.epsilon_rdp


METRICS = "metrics = { noise_multiplier = 0.01, bounds = { loss = [0.0, 10.0] } }"


@pytest.mark.parametrize("metrics", ["", METRICS])
async def test_a_clients_metrics_are_not_disclosed(site: Site, metrics: str) -> None:
    job, clients = await start(site, private(privacy=metrics)), await site.fleet(GOAL)
    for client, one in zip(clients, await site.assign(clients), strict=True):
        await client.deliver(one.token, update(1, 1.0), 10.0, {"loss": 4.0, "patient": 17.0})
    events = await site.operator.events(job)
    told = [event.metrics for event in events if event.metrics]
    (committed,) = await site.operator.rounds(job)
    if not metrics:
        assert told == []
        assert committed.client_metrics == {}
        return
    (only,) = told
    assert only == committed.client_metrics
    assert only.keys() == {"loss"}
    assert 0 < abs(only["loss"] - 4.0) < BOUND * 0.01 * 5.0 / GOAL


async def test_a_model_that_shows_the_largest_of_a_clients_numbers_is_refused(site: Site) -> None:
    largest = Parameters.from_arrays(dict(base().items()), "max")
    with pytest.raises(aio.AioRpcError, match='the model carries its integer entries by "max"'):
        await site.operator.create(private(), largest)


WHOLE_S = 900.0


def poisson(rate: float) -> str:
    tables = (
        f'[selection.sampling]\npolicy = "poisson"\nrate = {rate}\n'
        f'[updates]\nweighting = "uniform"\nclip_norm = {CLIP}\n'
        "[deadlines]\nselection_s = 3600\ntraining_s = 600\nupload_s = 300\n"
        f'[privacy]\nparticipation = "poisson"\ndelta = 1e-6\nnoise_multiplier = {LITTLE}\n'
    )
    return job_file("private", 1, GOAL, more=tables, close="deadline", wait_for=GOAL)


@pytest.mark.parametrize("rate", [1e-9, 1.0])
async def test_the_time_of_a_version_does_not_reveal_who_was_drawn(
    deadline_clock: DeadlineClock, site: Site, rate: float
) -> None:
    """If all clients report at once, or none was drawn, the version comes no earlier than after the whole time."""
    clients, other = await site.fleet(GOAL), await site.enroll("other")
    job = await start(site, poisson(rate))
    work = [asyncio.create_task(client.assignment()) for client in clients]
    if rate == 1.0:
        for client, one in zip(clients, await asyncio.gather(*work), strict=True):
            assert (await client.report_inline(one.token, update(1, 1.0).to_bytes())).HasField("receipt")
    await site.operator.until(job, "attempt", "COLLECTING")
    for skipped_s in (0.0, 600.0, WHOLE_S - 660.0):  # the rest is more than this test takes
        deadline_clock.skip(skipped_s)
        await other.refusal(wait_s=0.01)  # what is due was decided before
        assert (await site.operator.show(job)).current.phase == admin_pb2.ATTEMPT_PHASE_COLLECTING
    deadline_clock.skip(60.0)
    await site.operator.until(job, "job", "COMPLETED")
    assert (await site.operator.versions(job))[-1].num_updates == (GOAL if rate == 1.0 else 0)
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
