"""Measure the limit of a round: its bytes through raw gRPC streams, without any processing.

    python benchmarks/limit.py serve PORT BYTES CLIENTS ROUNDS SECONDS [PKI]
    python benchmarks/limit.py work PORT BYTES [PKI]

There is a server process and one process per client, as in a real deployment. In each round every client downloads
the model and uploads as many bytes, in chunks of 2 MiB, without a copy by protobuf. The next round starts when all
clients have done so. PKI is the folder that `fedplat-server init` creates: with it they use TLS.

Each process prints a line when it begins a round, and one at the end: the time, and the CPU seconds so far
of this process, of the user and of the kernel.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
from grpc import aio

CHUNK_BYTES = 2**21
_MEET, _DOWN, _UP = "/limit.Round/Meet", "/limit.Round/Down", "/limit.Round/Up"
_GO, _STOP = b"\x01", b"\x00"
_OPTIONS = (("grpc.max_receive_message_length", -1),)


class _Service(grpc.GenericRpcHandler):
    """Three calls: wait for all clients before a round, download the model, upload an update."""

    def __init__(self, size: int, clients: int, rounds: int, seconds: float) -> None:
        self._chunks = cut(size)
        self._clients = clients
        self._rounds = rounds
        self._deadline = time.monotonic() + seconds
        self._here = 0
        self._next: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.lines: list[str] = []
        self.done = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        if handler_call_details.method == _MEET:
            return grpc.unary_unary_rpc_method_handler(self._meet)
        if handler_call_details.method == _DOWN:
            return grpc.unary_stream_rpc_method_handler(self._down)
        return grpc.stream_unary_rpc_method_handler(self._up)

    async def _meet(self, request: bytes, context: object) -> bytes:
        self._here += 1
        mine = self._next
        if self._here == self._clients:
            self._here, self._next = 0, asyncio.get_running_loop().create_future()
            self.lines.append(line())
            over = len(self.lines) > 2 and time.monotonic() > self._deadline
            is_last = over or len(self.lines) > self._rounds
            mine.set_result(_STOP if is_last else _GO)
            if is_last:
                self.done.set()
        return await mine

    async def _down(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk

    async def _up(self, requests: AsyncIterator[bytes], context: object) -> bytes:
        async for _ in requests:
            pass
        return b""


def line() -> str:
    """Return the time and the CPU seconds so far, of the user and of the kernel."""
    used = os.times()
    return f"{time.time()} {used.user} {used.system}"


def cut(size: int) -> list[bytes]:
    """Return `size` bytes in chunks."""
    return [bytes(min(CHUNK_BYTES, size - start)) for start in range(0, size, CHUNK_BYTES)]


async def serve(port: int, service: _Service, pki: Path | None) -> list[str]:
    """Serve until the rounds are over, and return their lines."""
    server = aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((service,))
    if pki is None:
        server.add_insecure_port(f"127.0.0.1:{port}")
    else:
        pair = ((pki / "server.key").read_bytes(), (pki / "server.pem").read_bytes())
        server.add_secure_port(f"127.0.0.1:{port}", grpc.ssl_server_credentials([pair]))
    await server.start()
    await service.done.wait()
    await server.stop(grace=5.0)
    return service.lines


def connect(port: int, pki: Path | None) -> aio.Channel:
    """Open a channel to the server."""
    address = f"127.0.0.1:{port}"
    if pki is None:
        return aio.insecure_channel(address, options=_OPTIONS)
    return aio.secure_channel(address, grpc.ssl_channel_credentials((pki / "ca.pem").read_bytes()), options=_OPTIONS)


async def work(port: int, size: int, pki: Path | None) -> None:
    """Take part in rounds until the server ends them."""
    chunks = cut(size)
    async with connect(port, pki) as channel:
        meet: Callable[..., aio.UnaryUnaryCall[bytes, bytes]] = channel.unary_unary(_MEET)
        down: Callable[..., aio.UnaryStreamCall[bytes, bytes]] = channel.unary_stream(_DOWN)
        up: Callable[..., aio.StreamUnaryCall[bytes, bytes]] = channel.stream_unary(_UP)
        while await meet(b"", wait_for_ready=True) == _GO:
            print(line(), flush=True)
            async for _ in down(b""):
                pass
            await up(iter(chunks))
        print(line(), flush=True)


async def main(role: str, port: int, size: int, *rest: str) -> None:
    """Run the server or a client, as the command line requests."""
    if role == "work":
        await work(port, size, Path(rest[0]) if rest else None)
        return
    clients, rounds, seconds, *pki = rest
    service = _Service(size, int(clients), int(rounds), float(seconds))
    print(*await serve(port, service, Path(pki[0]) if pki else None), sep="\n", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]))
