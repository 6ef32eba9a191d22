"""Certificates for clients' own listeners, by a real server, and the ports that clients open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import msgspec
import psutil
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedplat.wire.auth import peer_host
from fedplat.wire.v1 import admin_pb2, fleet_pb2, peer_pb2, peer_pb2_grpc
from fedplat_client import Client, ClientOptions, IdentityError, ListenerError, Task, TrainResult
from fedplat_client._auth.mtls import PeerCredentials
from fedplat_client._state import data_dir
from fedplat_client._work.peers.listener import PeerListener
from fedplat_server.auth.tls import utc_now
from support import daemons
from support.daemons import RawClient, Site
from support.mtls import Place, make_pki, running
from support.peers import refusal
from support.ports import free_port

pytestmark = pytest.mark.calm  # they look at single answers


@pytest.fixture
async def place(folder: Path) -> AsyncGenerator[Place]:
    async with running(folder) as made:
        yield made


async def credentials_of(client: RawClient, *, listener: bool) -> PeerCredentials:
    key = data_dir.new_tls_key()
    request = fleet_pb2.RenewCertificateRequest(signing_request=data_dir.make_signing_request(key), listener=listener)
    answer = await client.stub.RenewCertificate(request, metadata=client.signed("RenewCertificate", request))
    return PeerCredentials(key, answer.certificate.encode(), answer.authorities.encode())


def names_of(credentials: PeerCredentials) -> tuple[list[str], set[x509.ObjectIdentifier]]:
    """The DNS names of a certificate, and what it is for."""
    extensions = x509.load_pem_x509_certificate(credentials.certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    usages = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    return names.get_values_for_type(x509.DNSName), set(usages)


def add_one(task: Task) -> TrainResult:
    task.parameters["bias"][:] += 1.0
    return TrainResult(parameters=task.parameters, num_examples=1)


async def sdk(site: Site, data_dir: Path, options: ClientOptions) -> Client:
    ticket = msgspec.structs.replace(await site.operator.ticket(), server=site.address)
    client = Client.from_ticket(ticket.to_text(), data_dir=data_dir, options=options)
    client.add_trainer("toy", add_one)
    return client


def ports() -> set[int]:
    """The ports on which this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}  # type: ignore[union-attr]


def call_listener(credentials: PeerCredentials, address: str, client_id: str) -> tuple[grpc.StatusCode, str]:
    with credentials.connect(address, client_id) as channel:
        return refusal(peer_pb2_grpc.PeerStub(channel).Fetch(peer_pb2.FetchRequest(digest="0" * 64), timeout=60.0))


async def test_only_a_client_that_asks_gets_a_certificate_for_a_listener(place: Place) -> None:
    client = await place.site.enroll()
    plain, listening = [await credentials_of(client, listener=listener) for listener in (False, True)]
    assert names_of(plain) == ([], {ExtendedKeyUsageOID.CLIENT_AUTH})
    usages = {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert names_of(listening) == ([peer_host(client.client_id)], usages)
    for each in (plain, listening):
        await place.certified(client, (each.key, each.certificate)).refusal()
        assert each.authorities == place.pki.ca.read_bytes()


async def test_while_an_authority_is_replaced_clients_trust_both(place: Place) -> None:
    client = await place.site.enroll()
    place.pki.rotate(utc_now())
    authorities = (await credentials_of(client, listener=True)).authorities
    assert len(x509.load_pem_x509_certificates(authorities)) == 2


async def test_while_an_authority_is_replaced_clients_believe_each_other(place: Place) -> None:
    """One renews its certificate hours after the other, which does not know the new authority until then."""
    before, after = await place.site.enroll(), await place.site.enroll()
    old = await credentials_of(before, listener=True)
    place.pki.rotate(utc_now())
    new = await credentials_of(after, listener=True)
    for listening, caller, client_id in ((new, old, after.client_id), (old, new, before.client_id)):
        with PeerListener("127.0.0.1:0", lambda own=listening: own) as listener:
            listener.open()
            answer = await asyncio.to_thread(call_listener, caller, f"127.0.0.1:{listener.port}", client_id)
            assert answer == (grpc.StatusCode.PERMISSION_DENIED, "NOT_A_NEIGHBOUR")


@pytest.mark.parametrize("mtls", [False, True])
async def test_a_client_opens_the_port_that_its_operator_names_and_no_other(
    mtls: bool, place: Place, tmp_path: Path
) -> None:
    port, before = free_port(), ports()
    silent = await sdk(place.site, tmp_path / "silent", ClientOptions(mtls=mtls))
    listening = await sdk(place.site, tmp_path / "listening", ClientOptions(mtls=mtls, peer_listen=f"127.0.0.1:{port}"))
    work = [asyncio.create_task(asyncio.to_thread(silent.run))]
    try:
        await place.site.waiting(1)
        assert ports() == before
        work.append(asyncio.create_task(asyncio.to_thread(listening.run)))
        await place.site.waiting(2)
        assert ports() - before == {port}
        other = await place.site.enroll()
        credentials = await credentials_of(other, listener=False)
        listed = await place.site.operator.clients.ListClients(admin_pb2.ListClientsRequest())
        found = [
            await asyncio.to_thread(call_listener, credentials, f"127.0.0.1:{port}", each.client_id)
            for each in listed.clients
        ]
        # One client has the name that was expected, and offers nothing; for the others the handshake fails.
        refused = (grpc.StatusCode.PERMISSION_DENIED, "NOT_A_NEIGHBOUR")
        assert sorted(found, key=str) == sorted([refused, *[(grpc.StatusCode.UNAVAILABLE, "")] * 2], key=str)
    finally:
        silent.stop()
        listening.stop()
        await asyncio.gather(*work)
    assert ports() == before


async def test_a_port_that_is_taken_ends_the_client(place: Place, tmp_path: Path) -> None:
    client = await sdk(place.site, tmp_path, ClientOptions(peer_listen=f"127.0.0.1:{place.site.daemon.port}"))
    with pytest.raises(ListenerError, match="choose a free port"):
        await asyncio.to_thread(client.run, 1)


async def test_a_server_without_client_certificates_is_named(folder: Path, tmp_path: Path) -> None:
    made = make_pki(folder)
    async with daemons.running(folder, tls=made.files) as site:
        client = await sdk(site, tmp_path, ClientOptions(peer_listen=f"127.0.0.1:{free_port()}"))
        with pytest.raises(IdentityError, match="issues no client certificates"):
            await asyncio.to_thread(client.run)
