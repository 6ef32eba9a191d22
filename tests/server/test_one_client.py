"""One attacker among honest clients, over real sockets: it neither stops a job nor sets its model, and is named."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_server.verify.inspection import verify
from support import daemons
from support.daemons import RawClient, Site, initial_model
from support.jobs import job_file

TEN = job_file(goal=10, rounds=2, over_selection=1.0, min_fraction=0.8)


def filled(value: float, *, one_entry: bool = False) -> Parameters:
    update = Parameters.zeros(initial_model().schema)
    values = np.zeros(update.schema.num_floating, np.float32)
    values[: 1 if one_entry else None] = value
    update.buffer[:] = values.view(np.uint8)
    return update


async def attack(
    site: Site, clients: Sequence[RawClient], attacker: Parameters, num_examples: float, honest: float = 100.0
) -> fleet_pb2.ReportResponse:
    """One attempt: all are assigned, the first client attacks, and the others report +0.1, one after the other."""
    work = await site.assign(list(clients))
    answer = await clients[0].deliver(work[0].token, attacker, num_examples)
    for client, one in zip(clients[1:-1], work[1:-1], strict=True):
        assert (await client.deliver(one.token, filled(0.1), honest)).HasField("receipt")
    await clients[-1].deliver(work[-1].token, filled(0.1), honest)  # closes the attempt, and may be told that it failed
    return answer


async def step(site: Site, job: str, version: int) -> np.ndarray:
    before, after = [(await site.operator.model(job, number)).to_vector() for number in (version - 1, version)]
    return after - before


def event_of(events: Sequence[admin_pb2.JobEvent], client: RawClient, state: str) -> admin_pb2.JobEvent:
    (found,) = [one for one in events if one.client_id == client.client_id and one.to_state == state]
    return found


@pytest.mark.fault("F43")
@pytest.mark.parametrize("value", [3e38, 3e30])
async def test_an_update_that_no_sum_holds_is_refused_with_its_norm(site: Site, value: float) -> None:
    """PoC 01a and 28: at commit 331edda the first abandons each attempt, and the second is committed."""
    job = await site.operator.start(TEN)
    clients = await site.fleet(10)
    answer = await attack(site, clients, filled(value, one_entry=True), 100.0)
    assert daemons.reason_name(answer.refusal.reason) == "REJECTED_NORM"
    assert f"the update's norm is {value:.6g} and its weight 100" in answer.refusal.text
    await site.operator.until(job, "version", "1")
    np.testing.assert_allclose(await step(site, job, 1), 0.1, atol=1e-6)
    (attempt,) = [one for one in await site.operator.rounds(job) if one.round == 1]
    assert (attempt.reported, attempt.rejected) == (9, 1)
    assert attempt.largest_norm == pytest.approx(value)


@pytest.mark.fault("F43")
async def test_an_outlier_is_dropped_by_name_and_the_model_is_that_of_the_others(site: Site) -> None:
    job = await site.operator.start(TEN.replace("rounds = 2", "rounds = 1"))
    clients = await site.fleet(10)
    answer = await attack(site, clients, filled(-1e15), 100.0)
    assert answer.HasField("receipt"), "the first report must be accepted, since there is nothing to compare it with"
    await site.operator.until(job, "version", "1")
    np.testing.assert_allclose(await step(site, job, 1), 0.1, atol=1e-6)
    dropped = event_of(await site.operator.events(job), clients[0], "REJECTED")
    norm, median = 1e15 * np.sqrt(8), float(np.linalg.norm(filled(0.1).to_vector()))
    assert (
        dropped.reason
        == f"its norm is {norm:.6g}, more than 1000 times {median:.6g}, the median of the attempt's updates"
    )
    assert dropped.norm == pytest.approx(norm)
    assert (await site.operator.versions(job))[1].num_updates == 9
    report = await verify(f"sqlite:///{site.folder / 'fedplat.sqlite'}", site.folder, live=True)
    assert report.findings == []


@pytest.mark.fault("F43")
async def test_a_job_in_memory_loses_one_attempt_to_an_outlier_and_no_more(site: Site) -> None:
    job = await site.operator.start('durability = "memory"\n' + TEN)
    clients = await site.fleet(10)
    await attack(site, clients, filled(-1e15), 100.0)
    abandoned = await site.operator.until(job, "attempt", "ABANDONED")
    assert f"{clients[0].client_id}: its norm is 2.82843e+15" in abandoned.reason
    answer = await attack(site, clients, filled(-1e15), 100.0)
    assert daemons.reason_name(answer.refusal.reason) == "REJECTED_OUTLIER"
    await site.operator.until(job, "version", "1")
    np.testing.assert_allclose(await step(site, job, 1), 0.1, atol=1e-6)


@pytest.mark.fault("F44")
async def test_a_client_that_claims_far_too_much_makes_little_of_the_model(site: Site) -> None:
    """PoC 01b: at commit 331edda the model becomes -0.999."""
    job = await site.operator.start(TEN)
    clients = await site.fleet(10)
    await attack(site, clients, filled(-1.0), 1e15)
    await site.operator.until(job, "version", "1")
    expected = np.average([-1.0, *[0.1] * 9], weights=[1000.0, *[100.0] * 9])
    np.testing.assert_allclose(await step(site, job, 1), expected, atol=1e-6)
    assert (await site.operator.versions(job))[1].total_weight == 1900.0
    report = await verify(f"sqlite:///{site.folder / 'fedplat.sqlite'}", site.folder, live=True)
    assert report.findings == []


@pytest.mark.fault("F44")
@pytest.mark.parametrize("num_examples", [1e-50, 1e18, float("nan"), 0.0])
async def test_a_number_of_examples_that_no_quotient_holds_is_refused(site: Site, num_examples: float) -> None:
    """PoC 17: at commit 331edda 1e-50 alone in an attempt is 0 / 0."""
    await site.operator.start(job_file(goal=1))
    (client,) = await site.fleet(1)
    (work,) = await site.assign([client])
    answer = await client.deliver(work.token, filled(0.1), num_examples)
    assert daemons.reason_name(answer.refusal.reason) == "REJECTED_WEIGHT"
    assert "expected a number from 1e-06 to 1e+15" in answer.refusal.text


@pytest.mark.fault("F45")
async def test_the_report_of_a_client_that_is_revoked_is_not_merged(site: Site) -> None:
    """PoC 09a: at commit 331edda the model is (666 + 0) / 2 = 333."""
    job = await site.operator.start(
        job_file(goal=3, over_selection=4 / 3, min_fraction=0.5, more="[updates]\noutlier_factor = 0\n")
    )
    clients = await site.fleet(4)
    work = await site.assign(clients)
    assert (await clients[0].deliver(work[0].token, filled(666.0))).HasField("receipt")
    await site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=clients[0].client_id))
    for client, one in list(zip(clients, work, strict=True))[1:]:
        assert (await client.deliver(one.token, filled(0.0))).HasField("receipt")
    await site.operator.until(job, "version", "1")
    np.testing.assert_array_equal(await step(site, job, 1), 0.0)
    assert event_of(await site.operator.events(job), clients[0], "DROPPED").reason == "REVOKED"


async def test_a_private_job_neither_stores_nor_shows_a_norm(site: Site) -> None:
    updates = '[updates]\nclip_norm = 1.0\nweighting = "uniform"\n'
    privacy = '[privacy]\nparticipation = "fixed"\nnoise_multiplier = 1.0\ndelta = 1e-5\n'
    text = job_file(goal=2, more=updates + privacy, close="deadline")
    job = await site.operator.start(text)
    clients = await site.fleet(2)
    work = await site.assign(clients)
    for client, one in zip(clients, work, strict=True):
        assert (await client.deliver(one.token, filled(0.1))).HasField("receipt")
    await site.operator.until(job, "version", "1")
    assert not any(one.HasField("norm") for one in await site.operator.events(job))
    assert not any(one.HasField("largest_norm") for one in await site.operator.rounds(job))
