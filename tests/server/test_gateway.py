"""Two daemons on one PostgreSQL, in this process: one leads, the other passes every call on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedplat import wire
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, fleet_pb2
from fedplat_server.auth import addresses
from fedplat_server.auth.addresses import ForwardedCall
from fedplat_server.config import LeaseTimes
from fedplat_server.errors import ConfigError
from support import daemons
from support.access import ADMIN_METADATA
from support.daemons import RawClient, Site, digest_of, initial_model, reason_name, update_of
from support.databases import execute_sql
from support.gateways import both_agree, code_of, leading, status
from support.jobs import job_file
from support.ports import free_port
from support.raw_client import private_key
from support.secure_clients import begin_all, expected_model, secure_job, together

TIMES = LeaseTimes(valid_s=60.0, renew_s=0.2, margin_s=1.0, poll_s=0.05)


def daemon(folder: Path, postgres: str) -> contextlib.AbstractAsyncContextManager[Site]:
    return daemons.running(folder, database=postgres, lease=TIMES)


@pytest.fixture
async def leader(tmp_path: Path, postgres: str) -> AsyncGenerator[Site]:
    async with daemon(tmp_path, postgres) as site:
        yield site


@pytest.fixture
async def gateway(leader: Site, postgres: str) -> AsyncGenerator[Site]:
    async with daemon(leader.folder, postgres) as site:
        yield site


async def is_healthy(site: Site) -> bool:
    request = health_pb2.HealthCheckRequest(service="fedplat.wire.v1.Fleet")
    answer = await cast(Any, health_pb2_grpc.HealthStub)(site.channel).Check(request)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.fault("F20")
async def test_a_job_completes_with_clients_of_both_daemons(leader: Site, gateway: Site) -> None:
    job = await gateway.operator.start(job_file(goal=2))
    one, two = await leader.enroll(), await gateway.enroll()
    tokens = [assignment.token for assignment in await gateway.assign([one, two])]
    base = await gateway.operator.export(job)
    assert base == await leader.operator.export(job)
    assert await two.download(digest_of(base)) == base
    for client, token, seed in ((one, tokens[0], 1), (two, tokens[1], 2)):
        answer = await client.deliver(token, update_of(initial_model(), seed))
        assert answer.HasField("receipt")
    events = await gateway.operator.events(job)
    assert events == await leader.operator.events(job)
    assert events[-1].to_state == "COMPLETED"


async def test_the_status_names_the_leader_and_the_gateway(leader: Site, gateway: Site) -> None:
    direct, passed_on = await status(leader), await status(gateway)
    assert (direct.term, direct.gateway, direct.leader_address) == (1, "", leader.address)
    assert passed_on.leader == direct.leader
    assert passed_on.gateway not in ("", direct.leader)
    assert await is_healthy(leader)
    assert await is_healthy(gateway)


async def test_refusals_arrive_as_the_leader_made_them(leader: Site, gateway: Site) -> None:
    clients = [RawClient(site.channel, private_key("unknown")) for site in (leader, gateway)]
    calls: tuple[Callable[[Site, RawClient], Awaitable[object]], ...] = (
        lambda site, _: site.operator.show("no-such-job"),
        lambda site, _: site.operator.export("no-such-job"),
        lambda site, _: site.operator.upload(b"no model"),
        lambda _, client: client.check_in(),
        lambda _, client: client.upload("token", b"bytes"),
        lambda _, client: client.download("0" * 64),
    )
    for call in calls:
        direct, passed_on = await code_of(call(leader, clients[0])), await code_of(call(gateway, clients[1]))
        assert passed_on == direct
        assert direct[2]


@pytest.mark.slow
async def test_cancellation_and_deadlines_reach_the_leader(leader: Site, gateway: Site) -> None:
    client, other = await gateway.fleet(2)
    waiting = client.check_in()
    await leader.waiting(1)
    waiting.cancel()
    await leader.waiting(0)
    request = fleet_pb2.CheckInRequest(protocol_version=wire.PROTOCOL_VERSION, trainers=["toy"], wait_s=60.0)
    for timeout_s in (0.5, 5.0, 50.0):  # until a call reaches the leader within its timeout
        late = other.stub.CheckIn(request, metadata=other.signed("CheckIn", request), timeout=timeout_s)
        arriving = asyncio.ensure_future(leader.waiting(1))
        ending = asyncio.ensure_future(code_of(late))
        await asyncio.wait([arriving, ending], return_when=asyncio.FIRST_COMPLETED)
        assert (await ending)[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        if arriving.done():
            break
        arriving.cancel()
    await leader.waiting(0)


async def test_a_stop_wakes_a_heartbeat_behind_the_gateway(leader: Site, gateway: Site) -> None:
    job = await leader.operator.start(job_file(goal=1))
    client = await gateway.enroll()
    token = (await client.assignment()).token
    heartbeat = client.heartbeat(token)
    await leader.operator.jobs.PauseJob(admin_pb2.JobRequest(job=job))
    assert reason_name((await heartbeat).stop.reason) == "JOB_PAUSED"


async def test_a_secure_aggregation_with_clients_of_both_daemons(leader: Site, gateway: Site) -> None:
    job = await leader.operator.start(secure_job(4))
    clients = [await leader.enroll(), *await gateway.fleet(3)]
    works = await begin_all(leader, clients, initial_model().schema.num_floating)
    await together(works, "take_part")
    await leader.operator.until(job, "job", "COMPLETED")
    model = await gateway.operator.model(job)
    assert model.to_vector().tobytes() == expected_model(initial_model(), works).tobytes()


async def test_a_message_beyond_the_limit_is_refused_and_one_of_the_largest_passes(gateway: Site) -> None:
    raw = cast(Any, gateway.channel.stream_unary)("/fedplat.wire.v1.Jobs/UploadModel")

    def model(size: int) -> list[bytes]:
        return [admin_pb2.UploadModelRequest(data=bytes(size)).SerializeToString()]

    too_large = raw(iter(model(wire.MAX_REQUEST_BYTES)), metadata=ADMIN_METADATA)
    assert (await code_of(too_large))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    largest = raw(iter(model(wire.MAX_REQUEST_BYTES - 100)), metadata=ADMIN_METADATA)
    assert (await code_of(largest))[0] is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
async def test_three_hundred_clients_wait_behind_one_gateway(leader: Site, gateway: Site) -> None:
    clients = await gateway.fleet(300)
    waiting = [asyncio.ensure_future(client.refusal(0.0)) for client in clients]
    assert {reason_name((await one).reason) for one in waiting} == {"NO_WORK"}
    calls = [client.check_in() for client in clients]
    await leader.waiting(300)
    for call in calls:
        call.cancel()
    await leader.waiting(0)


@pytest.mark.fault("F20", "F36")
async def test_a_leader_that_is_stopped_lets_the_other_lead_at_once(tmp_path: Path, postgres: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(daemon(tmp_path, postgres))
        async with daemon(tmp_path, postgres) as second:
            job = await second.operator.start(job_file(goal=1))
            client = await second.enroll()
            watching = second.operator.watch(job)
            await watching.read()
            before = await client.assignment()
            heartbeat = client.heartbeat(before.token)
            await stack.aclose()  # SIGTERM for the first one
            assert (await code_of(heartbeat))[0] is grpc.StatusCode.UNAVAILABLE
            assert (await code_of(to_the_end(watching)))[0] is grpc.StatusCode.UNAVAILABLE
            await leading(second, 2)
            await client.open_session()  # the new leader does not know the old leader's session
            after = await client.assignment()
            assert (await client.deliver(after.token, update_of(initial_model(), 1))).HasField("receipt")
            await second.operator.until(job, "job", "COMPLETED")
            assert [one.model.version for one in await second.operator.versions(job)] == [0, 1]
        assert first.task.done()


async def to_the_end(stream: aio.UnaryStreamCall[Any, Any]) -> None:
    while await stream.read() is not aio.EOF:
        pass


@pytest.mark.fault("F20")
async def test_a_leader_whose_term_is_over_becomes_a_gateway(leader: Site, gateway: Site, postgres: str) -> None:
    """The leader loses its lease: its writes are rejected, its callers are told, and it follows the new leader."""
    job = await leader.operator.start(job_file(goal=1))
    client = await leader.enroll()
    token = (await client.assignment()).token
    heartbeat, watching = client.heartbeat(token), leader.operator.watch(job)
    await watching.read()
    await execute_sql(postgres, "UPDATE leases SET term = term + 1, expires_unix_s = 0")
    assert (await code_of(heartbeat))[0] is grpc.StatusCode.UNAVAILABLE
    first, second = await both_agree(leader, gateway)
    assert first.term == second.term == 3
    job_there = await gateway.operator.show(job)
    assert job_there == await leader.operator.show(job)


@pytest.mark.fault("F19")
async def test_callers_get_unavailable_while_the_leader_is_out_of_reach(
    leader: Site, gateway: Site, postgres: str
) -> None:
    nowhere = f"holder = 'd-gone', address = '127.0.0.1:{free_port()}', expires_unix_s = expires_unix_s + 3600"
    await execute_sql(postgres, f"UPDATE leases SET term = term + 1, {nowhere}")
    for site in (leader, gateway):

        async def refused(there: Site = site) -> bool:
            with contextlib.suppress(aio.AioRpcError):
                await status(there)
                return False
            code, _, ours = await code_of(there.operator.show("any"))
            return (code, ours) == (grpc.StatusCode.UNAVAILABLE, "NO_LEADER")

        await daemons.until(refused, "the gateway to have no leader")

        async def unhealthy(there: Site = site) -> bool:
            return not await is_healthy(there)

        await daemons.until(unhealthy, "a health check that fails")


@pytest.mark.fault("F21")
async def test_what_callers_put_under_the_names_of_gateways_is_worth_nothing(leader: Site, gateway: Site) -> None:
    forged = addresses.add_forwarding(ADMIN_METADATA, "a guess", ForwardedCall("d-forged", "c-forged"))
    stub = admin_pb2_grpc.OperatorsStub(leader.channel)
    answer = await stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=cast(Any, tuple(forged)))
    assert answer.gateway == ""
    through = admin_pb2_grpc.OperatorsStub(gateway.channel)
    call = through.GetStatus(admin_pb2.GetStatusRequest(), metadata=cast(Any, tuple(forged)))
    assert (await code_of(call))[0] is grpc.StatusCode.UNAVAILABLE


def test_the_mark_of_a_gateway_is_believed_with_the_secret_only() -> None:
    given = [("authorization", "Bearer x"), ("fedplat-hop-client", "c-2"), ("user-agent", "test"), ("grpc-a", "b")]
    marked = addresses.add_forwarding(given, "secret", ForwardedCall("d-1", "c-1"))
    assert addresses.read_forwarding(marked, "secret") == ForwardedCall("d-1", "c-1")
    assert addresses.read_forwarding(marked, "another") is None
    assert addresses.read_forwarding(given, "secret") is None
    assert [key for key, _ in marked if not key.startswith("fedplat-hop-")] == ["authorization"]
    assert [value for key, value in marked if key == "fedplat-hop-client"] == ["c-1"]
    assert addresses.read_forwarding(
        addresses.add_forwarding((), "secret", ForwardedCall("d-1", "", "ipv4:10.0.0.7:1")), "secret"
    ) == ForwardedCall("d-1", "", "ipv4:10.0.0.7:1")


@pytest.mark.fault("F20")
async def test_a_folder_is_shared_by_the_daemons_of_a_postgresql_only(leader: Site, gateway: Site) -> None:
    assert gateway.folder == leader.folder
    with pytest.raises(ConfigError, match="another fedplat-server uses"):
        async with daemons.running(leader.folder):
            pass
