"""A daemon that asks for certificates, and clients that show them."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.message import Message
from grpc import aio

from fedplat.wire import auth
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import Client, ClientOptions
from fedplat_client._state import data_dir
from fedplat_client.task import TrainFunction
from fedplat_server.auth import pki_folder
from fedplat_server.auth import pki_folder as pki
from fedplat_server.auth.pki_folder import Authority, PkiFolder, certificate_pem, key_pem
from fedplat_server.auth.tls import utc_now
from support import daemons
from support.daemons import RawClient, Site
from support.raw_client import Metadata

S = grpc.StatusCode
DAY = datetime.timedelta(days=1)
Shown = tuple[bytes, bytes]
"""A private key and its certificate, PEM."""


class Clock:
    """The wall clock, and how far a test has moved it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


def nothing(method: str, request: Message | None) -> Metadata:
    return ()


class Certified(RawClient):
    """A client that is identified by its connection; `says` returns the metadata that it still sends with its calls."""

    says: Callable[[str, Message | None], Metadata] = staticmethod(nothing)

    def signed(self, method: str, request: Message | None) -> Metadata:
        return self.says(method, request)


@dataclasses.dataclass
class Place:
    """A daemon that asks for certificates."""

    site: Site
    pki: PkiFolder

    def channel(self, shown: Shown | None, port: int | None = None) -> aio.Channel:
        """A channel with its own connection."""
        credentials = grpc.ssl_channel_credentials(self.pki.ca.read_bytes(), *(shown or ()))
        options = [("grpc.use_local_subchannel_pool", 1)]
        at = f"localhost:{port or self.site.daemon.mtls_port}"
        self.site.channels.append(aio.secure_channel(at, credentials, options=options))
        return self.site.channels[-1]

    def certified(self, client: RawClient, shown: Shown | None, port: int | None = None) -> Certified:
        made = Certified(self.channel(shown, port), client.key)
        made.client_id = client.client_id
        return made

    async def certificate(self, client: RawClient) -> Shown:
        key = data_dir.new_tls_key()
        request = fleet_pb2.RenewCertificateRequest(signing_request=data_dir.make_signing_request(key))
        answer = await client.stub.RenewCertificate(request, metadata=client.signed("RenewCertificate", request))
        assert answer.port == self.site.daemon.mtls_port
        assert answer.valid_s == 86_400
        return key, answer.certificate.encode()

    async def sdk(self, data_dir: Path, train: TrainFunction, **options: Any) -> Client:
        """A client with the trainer of the jobs here."""
        ticket = msgspec.structs.replace(await self.site.operator.ticket(), server=self.site.address)
        made = ClientOptions(mtls=True, **options)
        client = Client.from_ticket(ticket.to_text(), data_dir=data_dir, options=made)
        client.add_trainer("toy", train)
        return client


def make_pki(folder: Path) -> PkiFolder:
    made = PkiFolder.of(folder)
    made.make_authority(utc_now())
    made.make_server(pki_folder.all_hosts([]), utc_now())
    return made


@contextlib.asynccontextmanager
async def running(folder: Path, clock: Callable[[], float] = time.time, **options: Any) -> AsyncGenerator[Place]:
    made = make_pki(folder)
    async with daemons.running(folder, tls=made.files, mtls_listen="127.0.0.1:0", clock=clock, **options) as site:
        yield Place(site, made)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status and the code of a call that is refused; no code where TLS itself refuses."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    codes = [value for key, value in caught.value.trailing_metadata() or () if key == auth.METADATA_CODE]
    return caught.value.code(), str(codes[0]) if codes else ""


def signed_by(authority: Authority, client_id: str, since: datetime.timedelta = 0 * DAY) -> Shown:
    """A certificate of this authority for a client in its first session, for one day that began `since` ago."""
    key = pki.new_key()
    made = authority.for_client(f"{client_id}/1", key.public_key(), utc_now() - since, DAY)
    return key_pem(key), certificate_pem(made)
