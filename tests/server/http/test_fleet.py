"""The Fleet service has the same outcomes over gRPC and over HTTP/1.1: one suite, on both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedplat.wire.auth import METADATA_CODE
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, fleet_pb2, model_pb2
from fedplat_server.config import Limits
from support import daemons
from support.access import ADMIN_TOKEN, authorized
from support.daemons import Site, digest_of, initial_model, update_of
from support.http_channel import HttpPeer, HttpStubChannel
from support.jobs import job_file
from support.raw_client import RawClient

pytestmark = pytest.mark.calm("what the store does has nothing to do with the transport")
Outcome = tuple[str, str, str]
TRANSPORTS = ("grpc", "http")


@pytest.fixture
async def site(folder: Path) -> AsyncGenerator[Site]:
    limits = Limits(refusal_delay_s=0.0)
    async with daemons.running(folder, limits=limits, http_listen="127.0.0.1:0") as site:
        yield site


def over(site: Site, client: RawClient, transport: str) -> RawClient:
    """The client in its session, over a transport."""
    return client if transport == "grpc" else client.over(http(site))


def http(site: Site) -> aio.Channel:
    return cast(aio.Channel, HttpStubChannel(HttpPeer(site.daemon.http_port)))


async def outcome(call: Any) -> Outcome:
    """The status of a call that is refused, its code, and its text."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    trailing = dict(caught.value.trailing_metadata() or ())
    return caught.value.code().name, str(trailing.get(METADATA_CODE)), caught.value.details() or ""


async def test_a_round_over_each_transport_commits_the_same_model(site: Site) -> None:
    update, models = update_of(initial_model(), seed=1), list[bytes]()
    for transport in TRANSPORTS:
        client = over(site, await site.enroll(), transport)
        job = await site.operator.start(job_file(goal=1))
        assignment = await client.assignment()
        model = await client.download(assignment.model.digest)
        assert model == initial_model().to_bytes()
        assert await client.download(assignment.model.digest, offset=10) == model[10:]
        beat = await client.heartbeat(assignment.token, wait_s=0.0)
        assert beat.proceed.remaining_s > 0.0
        content = update.to_bytes()
        part = await client.upload(assignment.token, content, end=20)
        assert (part.received_bytes, await client.query(assignment.token, digest_of(content))) == (20, 20)
        whole = await client.upload(assignment.token, content, offset=20)
        assert whole.received_bytes == len(content)
        assert (await client.report(assignment.token, digest_of(content))).HasField("receipt")
        await site.operator.until(job, "job", "COMPLETED")
        models.append(await site.operator.export(job))
    assert models[0] == models[1]


@pytest.mark.slow
async def test_refusals_are_the_same(site: Site) -> None:
    """Codes of each status: their text and their metadata arrive over both."""
    found = list[dict[str, Outcome]]()
    for transport in TRANSPORTS:
        client = over(site, await site.enroll(), transport)
        job = await site.operator.start(job_file(goal=1))
        found.append(await refusals(client, await client.assignment()))
        await site.operator.jobs.CancelJob(admin_pb2.JobRequest(job=job))
    assert found[0] == found[1]
    codes = {code for _, code, _ in found[0].values()}
    assert len(codes) >= 8
    assert "None" not in codes


async def refusals(client: RawClient, assignment: fleet_pb2.Assignment) -> dict[str, Outcome]:
    content, stub = b"0" * 100, client.stub
    heartbeat = fleet_pb2.HeartbeatRequest(token="no")
    signed = client.signed("Heartbeat", heartbeat)
    await stub.Heartbeat(heartbeat, metadata=signed)
    other = client.signed("Heartbeat", fleet_pb2.HeartbeatRequest(token="yes"))
    enrollment = fleet_pb2.EnrollRequest(protocol_version=1, population="demo", token="unknown", public_key=bytes(32))
    unknown = [(name, "gone" if name == "fedplat-session" else value) for name, value in signed]
    large = fleet_pb2.HeartbeatRequest(token="x" * 200_000)
    return {
        "replayed": await outcome(stub.Heartbeat(heartbeat, metadata=signed)),
        "signature": await outcome(stub.Heartbeat(heartbeat, metadata=other)),
        "session": await outcome(stub.Heartbeat(heartbeat, metadata=unknown)),
        "unauthenticated": await outcome(stub.Heartbeat(heartbeat, metadata=())),
        "challenge": await outcome(stub.Enroll(enrollment, metadata=())),
        "version": await outcome(client.check_in(version=99)),
        "model": await outcome(client.download("0" * 64)),
        "offset": await outcome(client.download(assignment.model.digest, offset=10**9)),
        "digest": await outcome(client.download("nonsense")),
        "upload": await outcome(client.upload(assignment.token, content, offset=7)),
        "stale": await outcome(client.upload("unknown", content)),
        "size": await outcome(client.upload(assignment.token, content, size_bytes=10**12)),
        "reason": await outcome(client.fail(assignment.token, model_pb2.REASON_SURPLUS)),
        "large": await outcome_code(stub.Heartbeat(large, metadata=client.signed("Heartbeat", large))),
    }


async def outcome_code(call: Any) -> Outcome:
    """Without the text: over HTTP nothing counts the bytes beyond the limit."""
    status, code, _ = await outcome(call)
    return status, code, ""


@pytest.mark.slow
async def test_a_client_that_is_gone_does_not_wait_any_more(site: Site) -> None:
    await site.operator.start(job_file(goal=2))
    client = over(site, await site.enroll(), "http")
    poll = asyncio.ensure_future(client.check_in())
    await waiting(site, 1)
    poll.cancel()
    await waiting(site, 0)


async def waiting(site: Site, count: int) -> None:
    while (await site.status()).num_waiting != count:
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_health_is_served_and_operators_are_not(site: Site) -> None:
    request = health_pb2.HealthCheckRequest()
    health: Any = health_pb2_grpc.HealthStub(http(site))
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    operators: Any = authorized(admin_pb2_grpc.OperatorsStub(http(site)), ADMIN_TOKEN)
    status, _, text = await outcome(operators.GetStatus(admin_pb2.GetStatusRequest()))
    assert (status, "--http-operators" in text) == ("UNIMPLEMENTED", True)


@pytest.mark.slow
async def test_operators_may_be_served(folder: Path) -> None:
    async with daemons.running(folder, http_listen="127.0.0.1:0", http_operators=True) as site:
        operators: Any = authorized(admin_pb2_grpc.OperatorsStub(http(site)), ADMIN_TOKEN)
        assert (await operators.GetStatus(admin_pb2.GetStatusRequest())).num_waiting == 0
        status, *_ = await outcome(admin_pb2_grpc.OperatorsStub(http(site)).GetStatus(admin_pb2.GetStatusRequest()))
        assert status == "UNAUTHENTICATED"
