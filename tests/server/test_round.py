"""Whole rounds over the wire, whose results a few lines of NumPy predict."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from grpc import aio

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from support import daemons
from support.daemons import RawClient, Site, initial_model, update_of
from support.deadlines import DeadlineClock
from support.jobs import job_file

CheckIn: TypeAlias = "aio.UnaryUnaryCall[Any, fleet_pb2.CheckInResponse]"


async def test_committed_model_is_the_weighted_mean_bit_for_bit(site: Site) -> None:
    job = await site.operator.start(job_file(goal=3))
    clients = await site.fleet(3)
    assignments = await site.assign(clients)
    base = Parameters.from_bytes(await clients[0].download(assignments[0].model.digest))
    updates = [update_of(base, seed) for seed in range(3)]
    weights = [3.0, 5.0, 0.25]
    for client, assignment, update, weight in zip(clients, assignments, updates, weights, strict=True):
        response = await client.deliver(assignment.token, update, weight, {"loss": weight})
        assert response.receipt.digest == daemons.digest_of(update.to_bytes())
    await site.operator.until(job, "job", "COMPLETED")

    total = np.zeros(base.schema.num_floating, np.float32)
    for update, weight in zip(updates, weights, strict=True):
        total += update.to_vector() * np.float32(weight)
    expected = base.to_vector() + total / np.float32(sum(weights))
    assert (await site.operator.model(job)).to_vector().tobytes() == expected.tobytes()

    shown = await site.operator.show(job)
    assert (shown.round, shown.status, shown.model.version) == (1, admin_pb2.JOB_STATUS_COMPLETED, 1)
    assert (shown.current.assigned, shown.current.reported) == (3, 3)
    np.testing.assert_allclose(shown.current.client_metrics["loss"], np.average(weights, weights=weights))
    first, second = await site.operator.versions(job)
    assert (first.model.version, second.num_updates, second.total_weight) == (0, 3, sum(weights))
    assert await site.operator.export(job, 0) == initial_model().to_bytes()


def adam(base: Parameters, deltas: list[np.ndarray]) -> np.ndarray:
    """FedAdam with the options of the test below (Reddi et al. 2021, Algorithm 2)."""
    x = base.to_vector().copy()
    m, v = np.zeros_like(x), np.full_like(x, 1e-2**2)
    for delta in deltas:
        m = 0.9 * m + (1 - 0.9) * delta
        v = np.float32(0.99) * v + np.float32(1 - 0.99) * np.square(delta)
        x += 0.1 * m / (np.sqrt(v) + 1e-2)
    return x


async def test_state_of_the_server_optimizer_survives_a_restart(folder: Path) -> None:
    text = job_file(rounds=3, goal=1, more='[aggregation]\nrule = "fedadam"\nlearning_rate = 0.1\ntau = 0.01')
    updates = [update_of(initial_model(), seed) for seed in range(3)]
    async with daemons.running(folder) as site:
        client = await site.enroll(key="the-one-client")
        job = await site.operator.start(text)
        for update in updates[:2]:
            assignment = await client.assignment()
            await client.deliver(assignment.token, update)
        await site.operator.until(job, "version", "2")
    async with daemons.running(folder) as site:
        client = await site.enroll(key="the-one-client")
        assignment = await client.assignment()
        assert (assignment.round, assignment.model.version) == (3, 2)
        await client.deliver(assignment.token, updates[2])
        await site.operator.until(job, "job", "COMPLETED")
        model = await site.operator.model(job)
    expected = adam(initial_model(), [update.to_vector() for update in updates])
    np.testing.assert_allclose(model.to_vector(), expected, rtol=1e-6)


async def test_integer_buffers_are_carried_by_the_rule_of_the_schema(site: Site) -> None:
    counters = {"weight": np.ones(2, np.float32), "batches": np.array([10, 20], np.int64)}
    base = Parameters.from_arrays(counters, "max")
    job = await site.operator.start(job_file(goal=2), base)
    clients = await site.fleet(2)
    for client, assignment, batches in zip(clients, await site.assign(clients), ([11, 25], [30, 21]), strict=True):
        update = {"weight": np.ones(2, np.float32), "batches": np.array(batches, np.int64)}
        await client.deliver(assignment.token, Parameters.from_arrays(update, "max"))
    await site.operator.until(job, "job", "COMPLETED")
    model = await site.operator.model(job)
    assert model["batches"].tolist() == [30, 25]
    assert model["weight"].tolist() == [2.0, 2.0]


async def test_goal_reached_tells_the_surplus_to_stop_at_once(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, over_selection=2.0))
    fast, slow = await site.fleet(2)
    one, two = await site.assign([fast, slow])
    heartbeat = slow.heartbeat(two.token)
    await fast.deliver(one.token, update_of(initial_model(), 0))
    stop = (await heartbeat).stop
    assert daemons.reason_name(stop.reason) == "SURPLUS"
    assert stop.text
    assert stop.retry.max_s >= stop.retry.min_s
    late = await slow.report(two.token, "0" * 64)
    assert daemons.reason_name(late.refusal.reason) == "SURPLUS"
    await site.operator.until(job, "job", "COMPLETED")
    assert (await site.operator.show(job)).current.surplus == 1


@pytest.mark.fault("F16")
async def test_deadline_drops_who_is_late_and_goes_on_with_the_others(
    deadline_clock: DeadlineClock, site: Site
) -> None:
    more = "[deadlines]\ntraining_s = 600.0\nselection_s = 3600\nheartbeat_s = 0.1"
    job = await site.operator.start(job_file(goal=2, min_fraction=0.5, more=more))
    quick, slow = await site.fleet(2)
    one, two = await site.assign([quick, slow])
    assert 0.0 < two.training_timeout_s <= 600.0  # less if the first answer was lost, and asked for again
    update = update_of(initial_model(), 0)
    await quick.deliver(one.token, update, 4.0)
    deadline_clock.skip(600.0)
    assert await slow.stop_reason(two.token) == "TRAIN_TIMEOUT"
    await site.operator.until(job, "job", "COMPLETED")

    answer = await slow.report(two.token, "0" * 64)
    assert daemons.reason_name(answer.refusal.reason) == "TRAIN_TIMEOUT"
    assert answer.refusal.HasField("retry")
    expected = initial_model().to_vector() + update.to_vector()
    assert (await site.operator.model(job)).to_vector().tobytes() == expected.tobytes()
    assert (await site.operator.show(job)).current.late == 1


async def test_federated_evaluation(site: Site) -> None:
    more = '[evaluation.clients]\nevaluator = "scorer"\ngoal = 2'
    job = await site.operator.start(job_file(goal=1, more=more))
    trainer = await site.enroll()
    await trainer.deliver((await trainer.assignment()).token, update_of(initial_model(), 0))
    scorers = await site.fleet(2)
    tasks = await asyncio.gather(*(client.assignment(trainers=(), evaluators=("scorer",)) for client in scorers))
    for client, task, accuracy in zip(scorers, tasks, (0.5, 1.0), strict=True):
        assert (task.task, task.trainer, task.model.version) == (fleet_pb2.TASK_EVALUATE, "scorer", 1)
        response = await client.report(task.token, num_examples=accuracy * 4, metrics={"accuracy": accuracy})
        assert response.HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")
    attempt = (await site.operator.show(job)).current
    assert attempt.kind == admin_pb2.ATTEMPT_KIND_EVALUATE
    np.testing.assert_allclose(attempt.client_metrics["accuracy"], (2 * 0.5 + 4 * 1.0) / 6)


async def test_bytes_for_an_evaluation_are_refused(site: Site) -> None:
    more = '[evaluation.clients]\nevaluator = "scorer"\ngoal = 1'
    await site.operator.start(job_file(goal=1, more=more))
    client = await site.enroll()
    await client.deliver((await client.assignment()).token, update_of(initial_model(), 0))
    task = await client.assignment(trainers=(), evaluators=("scorer",))
    refused = await client.report(task.token, "0" * 64)
    assert daemons.reason_name(refused.refusal.reason) == "REJECTED_DIGEST"


async def test_two_jobs_share_one_fleet(site: Site) -> None:
    jobs = [await site.operator.start(job_file(f"toy-{n}", rounds=2, goal=2)) for n in range(2)]
    clients = await site.fleet(4)
    for _ in range(2):
        for client, assignment in zip(clients, await site.assign(clients), strict=True):
            assert (await client.deliver(assignment.token, update_of(initial_model(), 1))).HasField("receipt")
    for job in jobs:
        await site.operator.until(job, "job", "COMPLETED")


@pytest.mark.fault("F33")
async def test_without_clients_a_job_waits_and_gives_a_reason(site: Site) -> None:
    more = "[deadlines]\nselection_s = 0.05\n[retry]\nbase_s = 0.05\nmax_s = 3600"
    job = await site.operator.start(job_file(goal=2, more=more))
    one = await site.enroll()
    waiting = one.check_in()  # one client is not enough
    await site.operator.until(job, "attempt", "ABANDONED")

    async def explained() -> bool:
        return "1 of at least 2 needed clients" in (await site.operator.show(job)).reason

    await daemons.until(explained, "the reason")
    assert not waiting.done()
    two = await site.enroll()
    assert (await two.assignment()).job_id == job  # the next attempts found both
    assert (await waiting).HasField("assignment")


@pytest.mark.slow
async def test_many_clients_at_once(site: Site) -> None:
    clients = await asyncio.gather(*(site.enroll() for _ in range(100)))
    calls = [client.check_in() for client in clients]
    await site.waiting(100)
    job = await site.operator.start(job_file(goal=100))
    update = update_of(initial_model(), 0).to_bytes()

    async def work(client: RawClient, call: CheckIn) -> None:
        assert (await client.report_inline((await call).assignment.token, update)).HasField("receipt")

    await asyncio.gather(*(work(client, call) for client, call in zip(clients, calls, strict=True)))
    await site.operator.until(job, "job", "COMPLETED")
    assert (await site.operator.versions(job))[-1].num_updates == 100


async def test_nothing_is_left_over_from_many_rounds(site: Site) -> None:
    client, update = await site.enroll(), update_of(initial_model(), 0).to_bytes()

    async def rounds(count: int) -> None:
        job = await site.operator.start(job_file(goal=1, rounds=count))
        for _ in range(count):
            token = (await client.assignment()).token
            heartbeat = client.heartbeat(token)
            await client.report_inline(token, update)
            heartbeat.cancel()
        await site.operator.until(job, "job", "COMPLETED")

    async def num_tasks() -> int:
        await site.waiting(0)
        return len(asyncio.all_tasks())

    await rounds(3)
    few = await num_tasks()
    await rounds(20)

    async def as_few() -> bool:
        return await num_tasks() <= few

    await daemons.until(as_few, "the tasks of the rounds to be gone")
    await daemons.until_spool_is_empty(site.folder)
