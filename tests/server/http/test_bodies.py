"""Bodies of uploads: each octet in its place, whatever parts they come in, and past h11 and its copies."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import random
import ssl
from pathlib import Path
from typing import Any, cast

import h11
import numpy as np
import pytest

from fedplat import http_connections
from fedplat.http_connections import BoundedProtocol
from fedplat.model import Parameters
from fedplat.wire.v1 import fleet_pb2
from fedplat_server.auth import pki_folder
from fedplat_server.auth.pki_folder import PkiFolder
from fedplat_server.config import Limits
from support import daemons
from support.daemons import Site, digest_of
from support.http_channel import HttpPeer, headers_of, read_answer, request
from support.jobs import job_file
from support.raw_client import FLEET, RawClient

pytestmark = [pytest.mark.slow, pytest.mark.calm("what the store does has nothing to do with the transport")]
SIZE_BYTES = 3_000_000
MODEL = Parameters.from_arrays({"weight": np.zeros(SIZE_BYTES // 4, np.float32)})
PATH = f"{FLEET}Upload"
LIMITS = Limits(refusal_delay_s=0.0)


async def client_at_work(site: Site, job: str) -> tuple[RawClient, str]:
    """A client over gRPC with an assignment; the token of that."""
    await site.operator.start(job_file(job, goal=1), model=MODEL)
    client = await site.enroll()
    return client, (await client.assignment()).token


async def upload(client: RawClient, token: str, content: bytes, peer: HttpPeer, seed: int) -> int:
    """Send the request in parts of any size, some with a pause for the server; return what it has received then."""
    header = fleet_pb2.UploadHeader(token=token, digest=digest_of(content), size_bytes=len(content))
    first = fleet_pb2.UploadRequest(header=header)
    metadata = [*client.signed("Upload", first), ("fedplat-request-bin", first.SerializeToString())]
    data = request(PATH, content, headers_of(metadata, "application/octet-stream"))
    rng = random.Random(seed)
    reader, writer = await peer.open()
    with contextlib.closing(writer):
        while data:
            size = rng.choice((1, 100, 5000, 16384, 70_000, 400_000))
            writer.write(data[:size])
            await writer.drain()
            data = data[size:]
        answer = await asyncio.wait_for(read_answer(reader), daemons.PATIENCE_S)
    assert answer.status == 200, answer
    return fleet_pb2.UploadResponse.FromString(answer.body).received_bytes


@pytest.mark.parametrize("with_tls", [False, True])
async def test_uploads_at_once_are_received_as_they_were_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch, with_tls: bool
) -> None:
    """The server checks the digests, and starts again at 0 if one is wrong. Few of the octets pass h11."""
    parsed, buffers = list[int](), list[object]()
    receive_data, share = h11.Connection.receive_data, cast(Any, BoundedProtocol)._share_buffer

    def count(connection: h11.Connection, data: bytes) -> None:
        parsed.append(len(data))
        receive_data(connection, data)

    def note(protocol: Any, secured: Any) -> None:
        share(protocol, secured)
        buffers.append(secured._ssl_protocol._ssl_buffer)

    monkeypatch.setattr(h11.Connection, "receive_data", count)
    monkeypatch.setattr(BoundedProtocol, "_share_buffer", note)
    files, tls = None, None
    if with_tls:
        made, now = PkiFolder.of(folder), datetime.datetime.now(datetime.UTC)
        made.make_authority(now)
        made.make_server(pki_folder.all_hosts([]), now)
        files, tls = made.files, ssl.create_default_context(cafile=made.ca)
    async with daemons.running(folder, tls=files, limits=LIMITS, http_listen="127.0.0.1:0") as site:
        peer = HttpPeer(site.daemon.http_port, tls)
        clients = [await client_at_work(site, f"job-{number}") for number in range(3)]
        contents = [random.Random(number).randbytes(SIZE_BYTES) for number in range(len(clients))]
        found = await asyncio.gather(
            *(
                upload(client, token, content, peer, number)
                for number, ((client, token), content) in enumerate(zip(clients, contents, strict=True))
            )
        )
    assert found == [SIZE_BYTES] * 3
    assert sum(parsed) < 3 * SIZE_BYTES / 4
    assert len(buffers) == (3 if with_tls else 0)
    assert all(each is buffers[0] for each in buffers)
    assert all(len(cast(Any, each)) == http_connections.TLS_BUFFER_BYTES for each in buffers)
