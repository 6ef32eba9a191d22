"""The processes of `transfer.py`. Each prints "ready", and then runs one transfer for each line of its stdin.

A line names the direction. The answer is one line of JSON with the seconds and the CPU seconds of this process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
from grpc import aio

from fedplat import wire
from fedplat.model import Parameters
from fedplat.wire import process_tuning
from fedplat.wire.auth import Ticket
from fedplat.wire.v1 import fleet_pb2
from fedplat_client import transport
from fedplat_client._auth.authenticator import Connection, SignedAccess
from fedplat_client._auth.enrollment import ClientDescription, ClientSession, Endpoints
from fedplat_client._state.data_dir import DataDirectory
from fedplat_client._state.model_cache import ModelCache
from fedplat_client._work import content, transfer
from fedplat_client.cancellation import StopSignal
from fedplat_client.link import ServerLink
from fedplat_client.task import Control

DOWN, UP = "/raw/Down", "/raw/Up"
NUM_CALLS = 200
_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
)


def pieces(size: int, chunk: int) -> list[bytes]:
    """Return `size` bytes in chunks."""
    return [os.urandom(1) * min(chunk, size - start) for start in range(0, size, chunk)]


def raw_server(host: str, size: int, chunk: int, key: str, certificate: str) -> None:
    """Run a server of `grpc.aio` that only sends and receives bytes."""
    asyncio.run(_serve(host, size, chunk, key, certificate))


async def _serve(host: str, size: int, chunk: int, key: str, certificate: str) -> None:
    model = pieces(size, chunk)

    async def down(request: bytes, context: object) -> AsyncIterator[bytes]:
        for piece in model:
            yield piece

    async def up(requests: AsyncIterator[bytes], context: object) -> bytes:
        async for _ in requests:
            pass
        return b""

    handlers = {
        "Down": grpc.unary_stream_rpc_method_handler(cast(Any, down)),
        "Up": grpc.stream_unary_rpc_method_handler(cast(Any, up)),
    }
    server = aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("raw", handlers),))
    if key:
        pair = (Path(key).read_bytes(), Path(certificate).read_bytes())
        port = server.add_secure_port(f"{host}:0", grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port(f"{host}:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def raw_client(address: str, size: int, chunk: int, ca: str) -> None:
    """Run a client of `raw_server`."""
    asyncio.run(_call(address, size, chunk, ca))


async def _call(address: str, size: int, chunk: int, ca: str) -> None:
    if ca:
        channel = aio.secure_channel(address, grpc.ssl_channel_credentials(Path(ca).read_bytes()), options=_OPTIONS)
    else:
        channel = aio.insecure_channel(address, options=_OPTIONS)
    await channel.channel_ready()
    update = pieces(size, chunk)

    async def down() -> None:
        async for _ in cast(Any, channel.unary_stream(DOWN))(b""):
            pass

    async def up() -> None:
        await cast(Any, channel.stream_unary(UP))(iter(update))

    def awaited(call: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        return lambda: asyncio.run_coroutine_threadsafe(cast(Any, call()), loop).result()

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(answer, {"down": awaited(down), "up": awaited(up)})


def tcp_server(host: str, size: int, chunk: int) -> None:
    """Send and receive bytes over one plain TCP connection."""
    listener = socket.create_server((host, 0))
    print(listener.getsockname()[1], flush=True)
    connection, _ = listener.accept()
    data, into = bytes(size), bytearray(chunk)
    while word := connection.recv(1):
        if word == b"d":
            connection.sendall(data)
        else:
            _take(connection, size, into)
            connection.sendall(b".")


def tcp_client(host: str, port: int, size: int, chunk: int) -> None:
    """Run the client of `tcp_server`."""
    connection = socket.create_connection((host, port))
    data, into = bytes(size), bytearray(chunk)

    def down() -> None:
        connection.sendall(b"d")
        _take(connection, size, into)

    def up() -> None:
        connection.sendall(b"u")
        connection.sendall(data)
        connection.recv(1)

    answer({"down": down, "up": up})


def _take(connection: socket.socket, size: int, into: bytearray) -> None:
    while size:
        size -= connection.recv_into(into, min(size, len(into)))


def fedplat_client(ticket: str, folder: str, over: str = transport.GRPC) -> None:
    """Run a client with an assignment. A download ends as a file of the cache; each upload is a new update.

    `over` is its transport. It can also make 200 calls that only ask how much of an upload has arrived ("calls").
    """
    process_tuning.reuse_message_memory()
    asked = Ticket.from_text(Path(ticket).read_text())
    directory = DataDirectory(Path(folder), asked.server, asked.population)
    with directory.lock():
        known = directory.load_identity(asked)
        server = known.http if over == transport.HTTP else known.server
        link = ServerLink(transport.ServerRoute(server, known.tls, known.ca, transport=over))
        access = SignedAccess(link, directory.load_signing_key(known), 30.0)
        connection, stop = Connection(access, 30.0, link), StopSignal()
        profile = ClientDescription(
            population=asked.population, labels={}, trainers=["noop"], evaluators=[], ticket=asked
        )
        session = ClientSession(Endpoints(access, connection, link), directory, known, profile, stop)
        session.enroll()
        reply = session.check_in(60.0)
        while not reply.HasField("assignment"):
            reply = session.check_in(60.0)
        _work(connection, directory.models, reply.assignment)


def _work(connection: Connection, models: Path, assignment: fleet_pb2.Assignment) -> None:
    cache = ModelCache(models, 2**40)
    control = Control(assignment.training_timeout_s, assignment.upload_timeout_s)
    model = assignment.model

    def down() -> None:
        for path in models.iterdir():
            path.unlink()
        with cache.part(model.digest) as part:
            transfer.download(connection, model, part, control, assignment.max_downloads)
            cache.admit(part, model.digest)

    down()
    update = Parameters.open(cache.find(model.digest) or "").copy()

    def up() -> None:
        update.buffer[:4] = np.frombuffer(os.urandom(3) + b"\0", np.uint8)
        transfer.upload(connection, assignment.token, content.Content(update.pieces), control)

    query = fleet_pb2.QueryUploadRequest(token=assignment.token, digest="0" * 64)

    def calls() -> None:
        for _ in range(NUM_CALLS):
            connection.query_upload(query, StopSignal())

    answer({"down": down, "up": up, "calls": calls})


def answer(directions: dict[str, Callable[[], None]]) -> None:
    """Run the requested transfers until stdin is closed."""
    print("ready", flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        directions[line.strip()]()
        done = {"seconds": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
        print(json.dumps(done), flush=True)


ROLES: dict[str, Callable[..., None]] = {
    "raw-server": raw_server,
    "raw-client": raw_client,
    "tcp-server": tcp_server,
    "tcp-client": tcp_client,
    "fedplat-client": fedplat_client,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*(int(value) if value.isdigit() else value for value in sys.argv[2:]))
