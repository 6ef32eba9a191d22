"""Who may send a message, decided before it is received: few unknown callers at a time, each for a few seconds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import force_setattr

from fedplat import wire
from fedplat.wire.v1 import fleet_pb2_grpc
from fedplat_server.config import Limits
from fedplat_server.rpc import serving
from fedplat_server.rpc.admission import MAX_WAITING_PER_CONNECTION, READS_PER_CONNECTION, Reads
from support import daemons, processes
from support.access import ADMIN_METADATA
from support.daemons import Site, initial_model, update_of
from support.jobs import job_file
from support.raw_client import CHALLENGE

FLEET = "/fedplat.wire.v1.Fleet/"
UPDATE = update_of(initial_model(), 0).to_bytes()


class Silent:
    """Open calls that have sent nothing: the server waits for a message from each."""

    def __init__(self, channel: aio.Channel) -> None:
        self._channel = channel
        self._over = asyncio.Event()
        self.calls: list[Any] = []

    def start(self, method: str, metadata: Any = ()) -> Any:
        async def messages() -> AsyncIterator[bytes]:
            await self._over.wait()
            return
            yield b""

        call: Any = self._channel.stream_unary(method)
        self.calls.append(call(messages(), metadata=metadata))
        return self.calls[-1]

    async def end(self) -> None:
        self._over.set()
        for call in self.calls:
            call.cancel()
        await asyncio.gather(*self.calls, return_exceptions=True)


@contextlib.asynccontextmanager
async def silent(site: Site) -> AsyncGenerator[Silent]:
    calls = Silent(site.channel)
    try:
        yield calls
    finally:
        await calls.end()


async def refusal_of(call: Any) -> tuple[grpc.StatusCode, str, str]:
    """Status, code and retry window of a call that is refused."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    trailers = dict(caught.value.trailing_metadata() or ())
    return caught.value.code(), str(trailers.get("fedplat-code")), str(trailers.get(wire.METADATA_RETRY, ""))


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
async def test_without_a_credential_no_message_is_received(site: Site) -> None:
    """None of these calls ever sends a message, and each is answered."""
    client = await site.enroll()
    unknown = [(key, "x" if key == "fedplat-session" else value) for key, value in client.signed("CheckIn", None)]
    bearer = (("authorization", "Bearer fedplat_op_" + "y" * 43),)
    async with silent(site) as calls:
        for method in ("CheckIn", "Upload", "Report", "Download", "Heartbeat", "Step"):
            assert (await refusal_of(calls.start(FLEET + method)))[1] == "UNAUTHENTICATED"
            assert (await refusal_of(calls.start(FLEET + method, unknown)))[1] == "SESSION_UNKNOWN"
        for method in ("Jobs/CreateJob", "Jobs/UploadModel", "Operators/GetStatus"):
            assert (await refusal_of(calls.start(f"/fedplat.wire.v1.{method}")))[1] == "NO_OPERATOR"
            assert (await refusal_of(calls.start(f"/fedplat.wire.v1.{method}", bearer)))[1] == "NO_OPERATOR"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Reads]:
    """The `Reads` of each daemon that is started."""
    found: list[Reads] = []

    def make(limits: Limits) -> Reads:
        found.append(Reads(limits))
        return found[-1]

    monkeypatch.setattr(serving, "Reads", make)
    return found


@contextlib.asynccontextmanager
async def another_connection(site: Site) -> AsyncGenerator[Any]:
    """A stub with its own connection."""
    assert site.open_channel is not None
    async with site.open_channel() as channel:
        yield fleet_pb2_grpc.FleetStub(channel)


def of_network(address: str) -> tuple[tuple[str, str], ...]:
    """The metadata with which a trusted proxy reports a caller."""
    return (("x-forwarded-for", address),)


PROXIES = ("127.0.0.0/8",)


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
async def test_strangers_have_few_reads_at_a_time_and_clients_go_on(folder: Path, made: list[Reads]) -> None:
    limits = Limits(newcomer_reads=2, newcomer_read_s=3600.0, newcomer_share_s=3600.0)
    health = f"127.0.0.1:{processes.free_port()}"
    async with daemons.running(folder, limits=limits, health_listen=health) as site, another_connection(site) as other:
        client = await site.enroll()
        reads = made[0]
        async with silent(site) as calls:
            for method in ("Enroll", "OpenSession"):
                calls.start(FLEET + method)

            async def full() -> bool:
                return reads.num_newcomers == 2

            await daemons.until(full, "the reads of strangers to be taken")
            force_setattr(limits, "newcomer_read_s", 0.1)
            status, code, window = await refusal_of(other.GetChallenge(CHALLENGE))
            assert (status, code) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
            assert window == "1 10"
            await client.refusal()  # a client with a session is served
            await site.status()  # and so is an operator
            async with aio.insecure_channel(health) as channel:  # and so are probes, on their own port
                probes: Any = health_pb2_grpc.HealthStub(channel)
                answer = await probes.Check(health_pb2.HealthCheckRequest(service="liveness"))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

        async def free() -> bool:
            return not reads.num_newcomers

        await daemons.until(free, "reads to be free again")
        assert (await other.GetChallenge(CHALLENGE)).nonce


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
async def test_a_newcomer_waits_for_a_turn_of_its_network(folder: Path, made: list[Reads]) -> None:
    limits = Limits(newcomer_reads_per_network=2, newcomer_read_s=3600.0, newcomer_share_s=3600.0)
    async with daemons.running(folder, limits=limits) as site, another_connection(site) as other:
        reads = made[0]
        async with silent(site) as calls:
            for _ in range(2):
                calls.start(FLEET + "GetChallenge")

            async def full() -> bool:
                return reads.num_newcomers == 2

            await daemons.until(full, "the turns of the network to be taken")
            asked = asyncio.ensure_future(other.GetChallenge(CHALLENGE))

            async def waiting() -> bool:
                return (reads.num_newcomers, reads.num_waiting) == (2, 1)

            await daemons.until(waiting, "the newcomer to wait for its turn")
        assert (await asked).nonce


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
@pytest.mark.parametrize(
    "networks",
    [["192.0.2.1"], ["192.0.2.1", "192.0.2.2", "192.0.2.3"], ["2001:db8::7", "2001:db8:0:1::7", "2001:db8:0:100::7"]],
    ids=["one", "several", "one /48"],
)
async def test_incomplete_messages_keep_no_newcomer_out(folder: Path, made: list[Reads], networks: list[str]) -> None:
    """All places are held, and refused calls come again: a newcomer gets a place, also as a neighbour."""
    limits = Limits(newcomer_reads=6, newcomer_reads_per_network=4, newcomer_read_s=3600.0, newcomer_share_s=0.05)
    async with (
        daemons.running(folder, limits=limits, trusted_proxies=PROXIES) as site,
        another_connection(site) as other,
        silent(site) as calls,
    ):

        async def hold(network: str) -> None:
            while True:
                with contextlib.suppress(aio.AioRpcError):
                    await calls.start(FLEET + "GetChallenge", of_network(network))

        attacks = [asyncio.create_task(hold(network)) for network in networks for _ in range(12)]

        async def full() -> bool:
            return made[0].num_newcomers >= 4 and made[0].num_waiting > 0

        await daemons.until(full, "the places to be taken")
        for network in ("198.51.100.1", "2001:db8:5::1", networks[0]):

            async def is_admitted(network: str = network) -> bool:
                with contextlib.suppress(aio.AioRpcError):  # a busy machine takes longer than the share of a message
                    return bool((await other.GetChallenge(CHALLENGE, metadata=of_network(network))).nonce)
                return False

            await daemons.until(is_admitted, f"a newcomer of {network} to be admitted")
        for attack in attacks:
            attack.cancel()
        await asyncio.gather(*attacks, return_exceptions=True)


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
async def test_an_oversized_message_of_a_newcomer_is_refused(site: Site) -> None:
    for method in (FLEET + "GetChallenge", FLEET + "OpenSession", "/grpc.health.v1.Health/Check"):
        call: Any = site.channel.unary_unary(method)(b"\x7a\x80\x10" + bytes(2048))
        status, code, _ = await refusal_of(call)
        assert (status, code) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_LARGE"), method


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
@pytest.mark.fault("F41")
async def test_a_connection_that_holds_its_calls_open_keeps_only_itself_waiting(
    folder: Path, made: list[Reads]
) -> None:
    async with (
        daemons.running(
            folder, limits=Limits(newcomer_reads_per_network=3, newcomer_read_s=3600.0, newcomer_share_s=3600.0)
        ) as site,
        another_connection(site) as neighbour,
    ):
        reads = made[0]
        async with silent(site) as calls:
            for _ in range(READS_PER_CONNECTION + MAX_WAITING_PER_CONNECTION):
                calls.start(FLEET + "GetChallenge")

            async def waiting() -> bool:
                return reads.num_waiting == MAX_WAITING_PER_CONNECTION

            await daemons.until(waiting, "calls to wait for their turn")
            assert reads.num_newcomers == READS_PER_CONNECTION
            _, code, _ = await refusal_of(calls.start(FLEET + "GetChallenge"))
            assert code == "TOO_MANY_REQUESTS"
            assert (await neighbour.GetChallenge(CHALLENGE)).nonce

        async def over() -> bool:
            return not reads.num_waiting and not reads.num_newcomers

        await daemons.until(over, "reads and turns to be free again")


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
async def test_a_call_whose_turn_does_not_come_is_refused(folder: Path) -> None:
    limits = Limits(newcomer_read_s=0.2, newcomer_share_s=3600.0)
    async with daemons.running(folder, limits=limits) as site, silent(site) as calls:
        refused = [await refusal_of(calls.start(FLEET + "GetChallenge")) for _ in range(2)]
        assert {code for _, code, _ in refused} == {"TOO_SLOW"}
        force_setattr(limits, "newcomer_read_s", 2.0)  # all calls arrive before the first one is given up
        many = [calls.start(FLEET + "GetChallenge") for _ in range(3 * READS_PER_CONNECTION)]
        codes = {code for _, code, _ in await asyncio.gather(*map(refusal_of, many))}
        assert codes == {"TOO_SLOW", "TOO_MANY_REQUESTS"}


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
async def test_a_message_that_does_not_come_in_time_is_given_up(folder: Path) -> None:
    limits = Limits()
    async with daemons.running(folder, limits=limits) as site:
        client = await site.enroll()
        for name, value in {"newcomer_read_s": 0.2, "idle_s": 0.2, "min_bytes_per_s": 2.0**30}.items():
            force_setattr(limits, name, value)  # from now on, when no messages arrive
        async with silent(site) as calls:
            for method, metadata in (
                (FLEET + "GetChallenge", ()),
                (FLEET + "CheckIn", client.signed("CheckIn", None)),
                ("/fedplat.wire.v1.Operators/GetStatus", ADMIN_METADATA),
                ("/grpc.health.v1.Health/Check", ()),
            ):
                status, code, _ = await refusal_of(calls.start(method, metadata))
                assert (status, code) == (grpc.StatusCode.DEADLINE_EXCEEDED, "TOO_SLOW"), method


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
async def test_one_client_has_few_reads_at_a_time(folder: Path) -> None:
    async with daemons.running(folder, limits=Limits(max_calls=3)) as site:
        one, other = await site.fleet(2)
        async with silent(site) as calls:
            held = [calls.start(FLEET + "CheckIn", one.signed("CheckIn", None)) for _ in range(4)]
            done, _ = await asyncio.wait(
                [asyncio.ensure_future(refusal_of(call)) for call in held], return_when=asyncio.FIRST_COMPLETED
            )
            assert {task.result()[1] for task in done} == {"TOO_MANY_CALLS"}
            await other.refusal()


@pytest.mark.calm("counts calls")
@pytest.mark.fault("F38")
async def test_watches_of_one_network_are_counted(folder: Path) -> None:
    """The oldest one ends for another; other networks, checks, and the port for probes are not affected."""
    limits = Limits(open_calls=6, open_calls_per_network=3)
    health = f"127.0.0.1:{processes.free_port()}"
    async with daemons.running(folder, limits=limits, trusted_proxies=PROXIES, health_listen=health) as site:
        stub: Any = health_pb2_grpc.HealthStub(site.channel)
        request, serving = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse.SERVING
        networks = [network for network in ("192.0.2.1", "192.0.2.2") for _ in range(3)]
        watches: list[Any] = []
        for network in networks:  # one after the other, so that the server has them in this order
            watches.append(stub.Watch(request, metadata=of_network(network)))
            assert (await watches[-1].read()).status == serving
        for network, oldest in (("192.0.2.2", watches[3]), ("198.51.100.1", watches[0])):
            one_more = stub.Watch(request, metadata=of_network(network))
            assert (await one_more.read()).status == serving
            with pytest.raises(aio.AioRpcError) as caught:
                await oldest.read()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(request, metadata=of_network("192.0.2.2"))).status == serving
        async with aio.insecure_channel(health) as channel:
            probes: Any = health_pb2_grpc.HealthStub(channel)
            for _ in range(4):
                assert (await probes.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == serving
        for watch in watches:
            watch.cancel()


@pytest.mark.calm("looks at the state of a connection")
@pytest.mark.fault("F38")
@pytest.mark.slow
async def test_connections_that_end_of_age_cost_no_round(folder: Path) -> None:
    """The connection is replaced again and again, and each poll and each report succeeds."""
    async with daemons.running(folder, limits=Limits(max_wait_s=5.0), connection_age_s=0.3) as site:
        num_replaced = 0

        async def watch() -> None:
            nonlocal num_replaced
            while True:
                state = site.channel.get_state(try_to_connect=True)
                num_replaced += state is grpc.ChannelConnectivity.IDLE
                await site.channel.wait_for_state_change(state)

        watching = asyncio.create_task(watch())
        job = await site.operator.start(job_file(rounds=1000, goal=2))
        clients = await site.fleet(2)
        num_rounds = 0
        while num_replaced < 5 or num_rounds < 10:
            tokens = [one.token for one in await site.assign(clients)]
            for client, token in zip(clients, tokens, strict=True):
                assert (await client.deliver(token, UPDATE)).HasField("receipt")
            num_rounds += 1
        watching.cancel()
        await site.operator.until(job, "attempt", "COMMITTED", num_rounds)
        assert {one.attempt for one in await site.operator.rounds(job)} == {1}
