"""A report with the next check-in: an accepted one is answered with the next assignment, if there is one soon."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fedplat import wire
from fedplat.secure_aggregation.setup import FEATURE
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.messages.streams import MemoryBudget
from fedplat_server.rpc import check_in, fleet
from support import daemons
from support.daemons import RawClient, Site, digest_of, initial_model, reason_name, update_of
from support.jobs import job_file
from support.raw_client import again
from support.secure_clients import secure_job

pytestmark = pytest.mark.calm("an assignment that is made while the store fails comes with the next check-in")
UPDATE = update_of(initial_model(), 1).to_bytes()


def check_in_of(**fields: object) -> fleet_pb2.CheckInRequest:
    given = {"protocol_version": wire.PROTOCOL_VERSION, "trainers": ["toy"], "wait_s": daemons.PATIENCE_S} | fields
    return fleet_pb2.CheckInRequest(**given)  # pyright: ignore[reportArgumentType]


async def report(client: RawClient, token: str, content: bytes = UPDATE, **fields: object) -> fleet_pb2.ReportResponse:
    request = fleet_pb2.ReportRequest(
        token=token, digest=digest_of(content), num_examples=1.0, update=content, check_in=check_in_of(**fields)
    )
    return await again(lambda: client.stub.Report(request, metadata=client.signed("Report", request)))


async def test_the_next_assignment_comes_with_the_receipt(site: Site) -> None:
    job = await site.operator.start(job_file(goal=1, rounds=2))
    client = await site.enroll()
    first = await client.assignment()
    assert first.check_in_with_report
    response = await report(client, first.token)
    assert response.HasField("receipt")
    assert (response.next.job_id, response.next.round) == (job, 2)
    assert (await client.report_inline(response.next.token, UPDATE)).HasField("receipt")
    await site.operator.until(job, "job", "COMPLETED")


async def test_no_report_waits_whose_client_has_to_unmask_a_sum(site: Site) -> None:
    """The other clients would wait for it in each round."""
    await site.operator.start(secure_job(goal=3))
    clients = await site.fleet(3)
    found = await asyncio.gather(*(client.assignment(features=(FEATURE,)) for client in clients))
    assert [each.check_in_with_report for each in found] == [False] * 3


async def test_a_report_that_waits_is_answered_soon_and_its_client_is_free(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_in, "NEXT_WAIT_S", 0.01)
    await site.operator.start(job_file(goal=1, rounds=1))
    client = await site.enroll()
    response = await report(client, (await client.assignment()).token)
    assert (response.HasField("receipt"), response.HasField("next")) == (True, False)
    await site.waiting(0)
    await site.operator.start(job_file("later", goal=1, rounds=1))
    assert (await client.assignment()).job_name == "later"


async def test_the_check_in_of_a_caller_that_is_gone_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_in, "NEXT_WAIT_S", daemons.PATIENCE_S)
    await site.operator.start(job_file(goal=1, rounds=1))
    client = await site.enroll()
    call = asyncio.ensure_future(report(client, (await client.assignment()).token))
    await site.waiting(1)
    call.cancel()
    await site.waiting(0)


async def test_a_round_that_takes_long_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "QUICK_S", 0.0)
    await site.operator.start(job_file(goal=1, rounds=2))
    client = await site.enroll()
    response = await report(client, (await client.assignment()).token)
    assert (response.HasField("receipt"), response.HasField("next")) == (True, False)
    assert (await client.assignment()).round == 2


async def test_reports_that_wait_hold_no_more_than_half_of_their_memory(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryBudget, "is_half_free", False)
    await site.operator.start(job_file(goal=1, rounds=2))
    client = await site.enroll()
    response = await report(client, (await client.assignment()).token)
    assert (response.HasField("receipt"), response.HasField("next")) == (True, False)


async def test_a_check_in_that_is_refused_costs_no_receipt(site: Site) -> None:
    await site.operator.start(job_file(goal=1, rounds=2))
    client = await site.enroll()
    response = await report(client, (await client.assignment()).token, labels={"no name": "x"})
    assert (response.HasField("receipt"), response.HasField("next")) == (True, False)


async def test_a_client_whose_report_is_refused_is_not_free(site: Site) -> None:
    await site.operator.start(job_file(goal=1, rounds=2))
    client = await site.enroll()
    response = await report(client, (await client.assignment()).token, initial_model().to_bytes() + b"more")
    assert reason_name(response.refusal.reason) == "REJECTED_SCHEMA"
    assert not response.HasField("next")
    await site.waiting(0)


async def test_a_server_that_stops_answers_reports_that_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_in, "NEXT_WAIT_S", daemons.PATIENCE_S)
    async with daemons.running(folder) as site:
        await site.operator.start(job_file(goal=1, rounds=1))
        client = await site.enroll()
        call = asyncio.ensure_future(report(client, (await client.assignment()).token))
        await site.waiting(1)
        site.daemon.stop()
        response = await call
        assert (response.HasField("receipt"), response.HasField("next")) == (True, False)
    await site.task
