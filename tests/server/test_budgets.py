"""Private jobs are calibrated when they are created, and populations keep within their budgets."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from grpc import aio

from fedplat.job import JobSpec, calibrate
from fedplat.privacy import Charge, accounting
from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination import job_checks
from support import daemons
from support.daemons import Site
from support.jobs import job_file
from support.private_jobs import DELTA, private

pytestmark = pytest.mark.calm  # they look at single answers


async def refused(call: Awaitable[object], code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code
    return caught.value.details() or ""


async def budget(site: Site, epsilon: float, delta: float = DELTA) -> admin_pb2.PopulationPrivacy:
    request = admin_pb2.SetPrivacyBudgetRequest(population="demo", epsilon=epsilon, delta=delta)
    return await site.operator.privacy.SetPrivacyBudget(request)


async def show(site: Site, job: str = "") -> admin_pb2.ShowPrivacyResponse:
    return await site.operator.privacy.ShowPrivacy(admin_pb2.ShowPrivacyRequest(job=job))


async def cancel(site: Site, job: str) -> None:
    await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))


def epsilon(releases: int, noise_multiplier: float = 10.0) -> float:
    mechanism = accounting.Mechanism("fixed", noise_multiplier)
    return accounting.epsilon([Charge(mechanism, releases)], DELTA)


async def test_a_job_is_calibrated_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, threads = 0, set[str]()

    def count(spec: JobSpec) -> JobSpec:
        nonlocal calls
        calls += 1
        threads.add(threading.current_thread().name)
        return calibrate(spec)

    monkeypatch.setattr(job_checks, "calibrate", count)
    text = private("epsilon = 2.0")
    same = await asyncio.gather(*(site.operator.create(text, key="the same key") for _ in range(4)))
    assert len({job.job_id for job in same}) == 1
    assert calls == 1
    assert threading.main_thread().name not in threads
    (record,) = await site.store.jobs.load_jobs()
    options = record.state.spec.privacy
    assert options is not None
    assert options.max_releases == 4
    assert same[0].job_file == text
    (job,) = (await show(site)).jobs
    assert job.noise_multiplier == options.noise_multiplier
    assert 1.9 < job.planned.epsilon <= 2.0
    assert job.released.releases == job.released.epsilon == 0


async def test_what_no_noise_can_keep_is_refused(site: Site) -> None:
    wrong = grpc.StatusCode.INVALID_ARGUMENT
    words = await refused(site.operator.create(private("epsilon = 2.0\nnoise_multiplier = 0.1")), wrong)
    assert words == (
        "the job file cannot be used: privacy: not even one release with noise_multiplier = 0.1 is within epsilon = 2 "
        "at delta = 1e-06; expected more of either"
    )
    words = await refused(site.operator.create(private("epsilon = 1e-6", rounds=1_000_000)), wrong)
    assert "no noise multiplier up to 1e+06 keeps 1000000 releases within epsilon 1e-06" in words
    assert (await show(site)).jobs == []


async def test_jobs_share_the_budget_of_their_population(site: Site) -> None:
    made = await budget(site, epsilon(10) * 1.001)
    assert made.epsilon == pytest.approx(epsilon(10) * 1.001)
    assert (made.committed.epsilon, made.num_private) == (0.0, 0)
    first = await site.operator.create(private(rounds=6))
    words = await refused(site.operator.create(private(rounds=5)))
    assert words == (
        "the population's privacy budget does not allow this: population demo has a budget of epsilon = "
        f"{epsilon(10) * 1.001:g} at delta = 1e-06, of which its other jobs have released or planned {epsilon(6):.4g}; "
        f"this job needs {epsilon(5):.4g} alone, and {epsilon(11):.4g} with them. The rest is enough for 4 of its "
        "5 releases. Expected fewer rounds, more noise (a smaller privacy.epsilon or a larger "
        "privacy.noise_multiplier), or that unneeded jobs are cancelled first"
    )
    await site.operator.create(private(rounds=4))
    await refused(site.operator.create(private(rounds=1)))
    await cancel(site, first.job_id)  # it has released nothing
    await site.operator.create(private(rounds=6))
    (population,) = (await show(site)).populations
    assert population.committed.releases == 10
    assert population.committed.epsilon == pytest.approx(epsilon(10))
    assert (await show(site)).jobs[0].status == admin_pb2.JOB_STATUS_CANCELLED


async def test_a_creation_that_is_repeated_is_not_charged_twice(site: Site) -> None:
    await budget(site, epsilon(4) * 1.001)
    first = await site.operator.create(private(), key="the same key")
    assert (await site.operator.create(private(), key="the same key")).job_id == first.job_id


async def test_a_budget_takes_private_jobs_only(site: Site) -> None:
    other = await site.operator.create(job_file("other"))
    words = await refused(budget(site, 3.0))
    assert words.endswith(
        f"population demo has open jobs without [privacy]: {other.job_id}; wait until they end, or cancel them"
    )
    await cancel(site, other.job_id)
    made = await budget(site, 3.0)
    assert (made.num_private, made.num_others) == (0, 1)
    words = await refused(site.operator.create(job_file("another")))
    assert words.endswith(
        "population demo has a budget (epsilon = 3 at delta = 1e-06), which a job without noise would exceed: "
        "expected a job with [privacy]"
    )
    await site.operator.create(job_file("another").replace('"demo"', '"elsewhere"'))


async def test_a_budget_is_no_less_than_what_is_planned(site: Site) -> None:
    await site.operator.create(private())
    words = await refused(budget(site, epsilon(3)))
    assert words.endswith(
        f"epsilon = {epsilon(3):g} at delta = 1e-06 is less than what the private jobs of population demo have "
        f"released or planned: {epsilon(4):.4g} at this delta; expected no less, or that jobs are cancelled first"
    )
    await budget(site, epsilon(4) * 1.001)
    await refused(budget(site, epsilon(4) * 1.001, delta=1e-9))
    await refused(site.operator.create(private(rounds=1)))
    remove = admin_pb2.RemovePrivacyBudgetRequest(population="demo")
    for _ in range(2):
        await site.operator.privacy.RemovePrivacyBudget(remove)
    await site.operator.create(job_file())
    noted = [
        (row.action, row.subject, row.details) for row in await site.store.audit.list_rows() if "budget" in row.action
    ]
    set_to = f'{{"delta":1e-06,"epsilon":{epsilon(4) * 1.001!r}}}'
    assert noted == [("privacy budget set", "demo", set_to), ("privacy budget removed", "demo", "{}")]


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, DELTA), (math.nan, DELTA), (math.inf, DELTA), (1.0, 0.0), (1.0, 1.0), (1.0, math.nan)]
)
async def test_an_invalid_budget_is_refused(site: Site, epsilon: float, delta: float) -> None:
    await refused(budget(site, epsilon, delta), grpc.StatusCode.INVALID_ARGUMENT)


async def test_two_creations_at_once_do_not_share_what_is_left(site: Site) -> None:
    await budget(site, epsilon(4) * 1.001)
    ends = await asyncio.gather(*(site.operator.create(private()) for _ in range(3)), return_exceptions=True)
    assert sorted(isinstance(end, aio.AioRpcError) for end in ends) == [False, True, True]


async def test_what_changes_while_it_is_looked_at_is_looked_at_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job without noise arrives while a budget is computed, and a budget while such a job is created."""
    real = job_checks.why_too_small
    loop = asyncio.get_running_loop()

    def disturbed(*arguments: Any) -> str:
        found = real(*arguments)
        if not found:
            asyncio.run_coroutine_threadsafe(site.operator.create(job_file("other"), key="other key"), loop).result(30)
        return found

    monkeypatch.setattr(job_checks, "why_too_small", disturbed)
    assert "has open jobs without [privacy]" in await refused(budget(site, 3.0))
    assert (await show(site)).populations == []
    monkeypatch.undo()
    await cancel(site, "other")
    waits = daemons.Gate()
    site.store.after["load_population"] = waits
    creation = asyncio.create_task(site.operator.create(job_file("late")))
    await waits.reached.wait()
    del site.store.after["load_population"]
    await budget(site, 3.0)
    waits.open()
    assert "expected a job with [privacy]" in await refused(creation)


async def test_a_job_that_is_not_private_is_shown_as_such(site: Site) -> None:
    job = await site.operator.create(job_file())
    found = await show(site, job.job_id)
    assert found.jobs[0] == admin_pb2.JobPrivacy(
        job_id=job.job_id, name="toy", population="demo", status=admin_pb2.JOB_STATUS_DRAFT
    )
    assert (await show(site)).jobs == []
    await refused(show(site, "nobody"), grpc.StatusCode.NOT_FOUND)
