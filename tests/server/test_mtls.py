"""Clients that show certificates: real handshakes on the port for those, with raw clients and with the SDK."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from grpc import aio

from fedplat import wire
from fedplat.wire.v1 import admin_pb2, admin_pb2_grpc, fleet_pb2
from fedplat_client import Client, ClientOptions, Task, TrainResult
from fedplat_client.cancellation import StopSignal
from fedplat_client.errors import EnrollmentError, FencedError, IdentityError, RevokedError
from fedplat_server.auth.pki_folder import Authority
from fedplat_server.auth.tls import utc_now
from fedplat_server.config import LeaseTimes
from fedplat_server.errors import ConfigError
from support import daemons
from support.access import authorized
from support.jobs import job_file
from support.mtls import DAY, Clock, Place, S, Shown, make_pki, refused, running, signed_by
from support.raw_client import Metadata

pytestmark = pytest.mark.calm  # they look at single answers


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def place(folder: Path, clock: Clock) -> AsyncGenerator[Place]:
    async with running(folder, clock) as made:
        yield made


# --- who is believed -------------------------------------------------------------------------------------------------


async def test_the_certificate_identifies_the_caller(place: Place) -> None:
    job = await place.site.operator.start(job_file(goal=1))
    client = await place.site.enroll()
    certified = place.certified(client, await place.certificate(client))
    token = (await certified.assignment()).token
    update = daemons.update_of(daemons.initial_model(), 1)
    assert (await certified.deliver(token, update)).HasField("receipt")
    await place.site.operator.until(job, "job", "COMPLETED")


async def test_a_client_cannot_act_as_another_one(place: Place) -> None:
    """Neither the other client's session and key help, nor a header that claims to come from a gateway."""
    await place.site.operator.start(job_file(goal=1))
    victim, other = await place.site.fleet(2)
    token = (await victim.assignment()).token
    certified = place.certified(other, await place.certificate(other))
    name = f"{victim.client_id}/1"

    def passed_on(method: str, request: Message | None) -> Metadata:
        return (("fedplat-hop-secret", ""), ("fedplat-hop-gateway", "d-1"), ("fedplat-hop-client", name))

    for says in (victim.signed, passed_on):
        certified.says = says
        assert await refused(certified.upload(token, b"content")) == (S.NOT_FOUND, "STALE_ASSIGNMENT")
        assert await certified.stop_reason(token) == "STALE"
    await victim.upload(token, b"content")


async def test_strangers_certificates_are_refused(place: Place) -> None:
    client = await place.site.enroll()
    stranger = Authority.new(utc_now())
    server: Shown = place.pki.files.key.read_bytes(), place.pki.files.certificate.read_bytes()
    for shown in (None, signed_by(stranger, client.client_id), server):
        assert await refused(place.certified(client, shown).check_in(0.0)) == (S.UNAVAILABLE, "")
    unknown = place.certified(client, signed_by(place.pki.authority(), "c-unknown"))
    assert await refused(unknown.check_in(0.0)) == (S.UNAUTHENTICATED, "CLIENT_UNKNOWN")


async def test_on_the_other_port_a_certificate_proves_nothing(place: Place) -> None:
    client = await place.site.enroll()
    certified = place.certified(client, await place.certificate(client), place.site.daemon.port)
    assert await refused(certified.check_in(0.0)) == (S.UNAUTHENTICATED, "UNAUTHENTICATED")
    await client.refusal()


async def test_no_certificate_leads_to_the_next_one(place: Place) -> None:
    client = await place.site.enroll()
    certified = place.certified(client, await place.certificate(client))
    assert await refused(place.certificate(certified)) == (S.UNAUTHENTICATED, "UNAUTHENTICATED")


async def test_operators_need_their_token_on_this_port_too(place: Place) -> None:
    client = await place.site.enroll()
    stub = admin_pb2_grpc.OperatorsStub(place.channel(await place.certificate(client)))
    assert await refused(stub.GetStatus(admin_pb2.GetStatusRequest())) == (S.UNAUTHENTICATED, "NO_OPERATOR")
    await authorized(stub).GetStatus(admin_pb2.GetStatusRequest())


@pytest.mark.fault("F30")
async def test_revocation_works_at_the_next_request(place: Place) -> None:
    client = await place.site.enroll()
    shown = await place.certificate(client)
    certified = place.certified(client, shown)
    await certified.refusal()
    await place.site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=client.client_id))
    assert await refused(certified.check_in(0.0)) == (S.PERMISSION_DENIED, "REVOKED")
    assert await refused(place.certified(client, shown).check_in(0.0)) == (S.PERMISSION_DENIED, "REVOKED")
    assert await refused(place.certificate(client)) == (S.PERMISSION_DENIED, "REVOKED")


async def test_certificates_are_noted_once_an_hour_for_each_client(place: Place) -> None:
    clients = await place.site.fleet(3)
    for _ in range(3):
        await asyncio.gather(*(place.certificate(client) for client in clients))
    audit = (await place.site.operator.operators.ListAudit(admin_pb2.ListAuditRequest())).events
    issued = [event.subject for event in audit if event.action == "client certificate issued"]
    assert sorted(issued) == sorted(client.client_id for client in clients)


@pytest.mark.fault("F30")
async def test_a_new_session_fences_the_certificates_of_older_ones(place: Place) -> None:
    client = await place.site.enroll(key="the-one-client")
    certified = place.certified(client, await place.certificate(client))
    await certified.refusal()
    again = await place.site.enroll(key="the-one-client")
    for _ in range(2):
        assert await refused(certified.check_in(0.0)) == (S.PERMISSION_DENIED, "FENCED")
    await place.certified(again, await place.certificate(again)).refusal()
    audit = (await place.site.operator.operators.ListAudit(admin_pb2.ListAuditRequest())).events
    assert [event.subject for event in audit if event.action == "client fenced"] == [client.client_id]


@pytest.mark.fault("F30")
async def test_an_sdk_whose_identity_runs_elsewhere_ends(place: Place, tmp_path: Path) -> None:
    """The copy takes over the assignment in the middle of the training."""

    def train(task: Task) -> TrainResult:
        shutil.copytree(tmp_path / "client", tmp_path / "copy")
        copy = Client.from_ticket(data_dir=tmp_path / "copy", options=ClientOptions(mtls=True))
        copy.add_trainer("toy", add_one)
        copy.run(1)
        return add_one(task)

    job = await place.site.operator.start(job_file(goal=1))
    client = await place.sdk(tmp_path / "client", train)
    with pytest.raises(FencedError):
        await asyncio.to_thread(client.run, 1)
    assert (await place.site.operator.events(job))[-1].to_state == "COMPLETED"
    np.testing.assert_allclose((await place.site.operator.model(job))["bias"], 2.0)


# --- expiry and rotation ---------------------------------------------------------------------------------------------


@pytest.mark.fault("F31")
async def test_an_expired_certificate_is_refused_with_the_reason(place: Place, clock: Clock) -> None:
    client = await place.site.enroll()
    certified = place.certified(client, await place.certificate(client))
    clock.ahead_s = 86_000
    await certified.refusal()
    clock.ahead_s = 86_500
    with pytest.raises(aio.AioRpcError, match=r"expired; renew it: it was valid until 20\d\d-.* UTC"):
        await certified.check_in(0.0)  # on the connection that was made with it
    assert await refused(certified.check_in(0.0)) == (S.UNAUTHENTICATED, "CERTIFICATE_EXPIRED")
    await place.certificate(client)


@pytest.mark.fault("F31")
async def test_tls_itself_refuses_an_expired_certificate(place: Place) -> None:
    client = await place.site.enroll()
    expired = place.certified(client, signed_by(place.pki.authority(), client.client_id, since=2 * DAY))
    assert await refused(expired.check_in(0.0)) == (S.UNAVAILABLE, "")


@pytest.mark.fault("F31")
async def test_certificates_of_both_authorities_are_good_while_one_replaces_the_other(place: Place) -> None:
    client = await place.site.enroll()
    old = await place.certificate(client)
    place.pki.rotate(utc_now())
    new = await place.certificate(client)
    for shown in (old, new):
        await place.certified(client, shown).refusal()
    place.pki.finish_rotation(utc_now())
    await place.certified(client, new).refusal()
    assert await refused(place.certified(client, old).check_in(0.0)) == (S.UNAVAILABLE, "")


# --- the SDK ---------------------------------------------------------------------------------------------------------


def add_one(task: Task) -> TrainResult:
    task.parameters["bias"][:] += 1.0
    return TrainResult(parameters=task.parameters, num_examples=1)


@pytest.mark.fault("F31")
async def test_a_job_over_mtls_loses_nothing_when_certificates_are_renewed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round's certificate is replaced between the download of the model and the report."""
    moved_s = [0.0]

    def train(task: Task) -> TrainResult:
        if task.round == 2:
            moved_s[0] += 60_000.0
        return add_one(task)

    job = await place.site.operator.start(job_file(goal=1, rounds=3, more="[deadlines]\ntraining_s = 80000\n"))
    client = await place.sdk(tmp_path / "client", train, clock=lambda: time.monotonic() + moved_s[0])
    issued, real = [0], Authority.for_client

    def counted(*args: Any, **options: Any) -> Any:
        issued[0] += 1
        return real(*args, **options)

    monkeypatch.setattr(Authority, "for_client", counted)
    await asyncio.to_thread(client.run, 3)
    events = await place.site.operator.events(job)
    assert events[-1].to_state == "COMPLETED"
    attempts = await place.site.operator.rounds(job)
    assert [(one.round, one.attempt, one.reported, one.failed) for one in attempts] == [(n, 1, 1, 0) for n in (1, 2, 3)]
    np.testing.assert_allclose((await place.site.operator.model(job))["bias"], 4.0)
    assert issued == [2]
    key = next((tmp_path / "client").glob("*/*/tls.key"))
    assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.fault("F31")
async def test_the_sdk_gets_another_certificate_when_tls_refuses_the_one_it_has(
    place: Place, clock: Clock, tmp_path: Path
) -> None:
    job = await place.site.operator.start(job_file(goal=1))
    clock.ahead_s = -2 * 86_400.0  # every issued certificate has already expired

    def wait(stop: StopSignal, delay_s: float) -> bool:
        clock.ahead_s = 0.0
        return stop.is_set()

    client = await place.sdk(tmp_path / "client", add_one, wait=wait)
    await asyncio.to_thread(client.run, 1)
    assert clock.ahead_s == 0.0
    assert (await place.site.operator.events(job))[-1].to_state == "COMPLETED"


@pytest.mark.fault("F31")
async def test_the_sdk_gets_another_certificate_when_the_server_reports_it_as_expired(
    place: Place, clock: Clock, tmp_path: Path
) -> None:
    """The client's clock stands still while the server's goes from 30 minutes before the expiry to 6 after it."""

    def train(task: Task) -> TrainResult:
        clock.ahead_s = 0.6 * 3600
        return add_one(task)

    def wait(stop: StopSignal, delay_s: float) -> bool:
        raise AssertionError("nothing was wrong")

    job = await place.site.operator.start(job_file(goal=1, rounds=2))
    clock.ahead_s = -23.5 * 3600
    client = await place.sdk(tmp_path / "client", train, wait=wait)
    await asyncio.to_thread(client.run, 2)
    assert (await place.site.operator.events(job))[-1].to_state == "COMPLETED"


async def test_a_client_that_is_revoked_ends(place: Place, tmp_path: Path) -> None:
    client = await place.sdk(tmp_path / "client", add_one)
    working = asyncio.create_task(asyncio.to_thread(client.run))
    await place.site.waiting(1)
    listed = await place.site.operator.clients.ListClients(admin_pb2.ListClientsRequest())
    await place.site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=listed.clients[0].client_id))
    with pytest.raises(RevokedError):
        await working


async def test_servers_without_certificates_for_clients_are_named(folder: Path, tmp_path: Path) -> None:
    made = make_pki(folder)
    async with daemons.running(folder, tls=made.files) as site:
        client = await Place(site, made).sdk(tmp_path / "one", add_one)
        with pytest.raises(IdentityError, match=r"issues no client certificates: .* sign the calls"):
            await asyncio.to_thread(client.run)
    async with daemons.running(folder) as site:
        client = await Place(site, made).sdk(tmp_path / "two", add_one)
        with pytest.raises(EnrollmentError, match="without TLS"):
            await asyncio.to_thread(client.run)


# --- the start, and several daemons ----------------------------------------------------------------------------------


async def test_a_server_without_the_authoritys_key_does_not_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"--mtls-listen needs TLS; leave --insecure out"):
        async with daemons.running(folder, mtls_listen="127.0.0.1:0"):
            pass
    made = make_pki(folder)
    made.ca_key.unlink()
    with pytest.raises(ConfigError, match=r"--mtls-listen needs the private authority .*ca\.key.* init creates one"):
        async with running(folder):
            pass


@pytest.mark.fault("F20")
async def test_a_gateway_tells_the_leader_whose_certificate_it_saw(tmp_path: Path, postgres: str, clock: Clock) -> None:
    times = LeaseTimes(valid_s=60.0, renew_s=0.2, margin_s=1.0, poll_s=0.05)
    async with (
        running(tmp_path, database=postgres, lease=times) as leader,
        running(tmp_path, clock, database=postgres, lease=times) as gateway,
    ):
        status = await gateway.site.status()
        assert status.gateway not in ("", status.leader)
        await leader.site.operator.start(job_file(goal=1))
        client, other = await leader.site.fleet(2)
        shown = await leader.certificate(client)
        certified = gateway.certified(client, shown)
        token = (await certified.assignment()).token
        certified.says = other.signed
        update = daemons.update_of(daemons.initial_model(), 1)
        assert (await certified.deliver(token, update)).HasField("receipt")
        request = fleet_pb2.CheckInRequest(protocol_version=wire.PROTOCOL_VERSION)
        plain = gateway.certified(client, shown, gateway.site.daemon.port)
        assert await refused(plain.stub.CheckIn(request)) == (S.UNAUTHENTICATED, "UNAUTHENTICATED")
        clock.ahead_s = 90_000.0
        assert await refused(certified.check_in(0.0)) == (S.UNAUTHENTICATED, "CERTIFICATE_EXPIRED")
        await gateway.site.operator.clients.RevokeClient(admin_pb2.RevokeClientRequest(client_id=client.client_id))
        clock.ahead_s = 0.0
        assert await refused(certified.check_in(0.0)) == (S.PERMISSION_DENIED, "REVOKED")
