"""A server for a crowd of clients at one address, in a process of its own.

    python benchmarks/crowd_server.py DATA_DIR HOST:PORT [--insecure] [--bare]

It is `fedplat-server run` but for the limits of what one address may ask for: here ten thousand clients have the same.
`--bare` is what gRPC for Python itself takes: the same long polls with nothing behind them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from grpc import aio

from fedplat_server import logs
from fedplat_server.config import Limits, ServerConfig
from fedplat_server.daemon import Daemon, stop_on_signals
from fedplat_server.private_pki import PkiFolder
from fedplat_server.rpc import serving

BARE = "bench.Bare"


class Bare(grpc.GenericRpcHandler):
    """`Wait` answers when `Release` is called, `Ask` at once."""

    def __init__(self) -> None:
        self._released = asyncio.Event()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Who takes a call."""
        name = handler_call_details.method.rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler({"Wait": self.wait, "Release": self.release, "Ask": self.ask}[name])

    async def wait(self, request: bytes, context: Any) -> bytes:
        """The long poll."""
        await self._released.wait()
        return request

    async def release(self, request: bytes, context: Any) -> bytes:
        """Ends the long polls."""
        self._released.set()
        self._released = asyncio.Event()
        return request

    async def ask(self, request: bytes, context: Any) -> bytes:
        """The empty call."""
        return request


def main(
    data_dir: Path,
    listen: str,
    insecure: Annotated[bool, typer.Option("--insecure")] = False,
    bare: Annotated[bool, typer.Option("--bare")] = False,
) -> None:
    """Serve until SIGTERM."""
    logs.configure("WARNING", json=False)
    config = ServerConfig(
        listen=listen,
        data_dir=data_dir,
        database=f"sqlite:///{data_dir / 'fedplat.sqlite'}",
        limits=Limits(anonymous_per_minute=1e9, requests_per_minute=1e9),
        tls=None if insecure else PkiFolder.of(data_dir).files,
    )
    asyncio.run(_bare(config) if bare else _daemon(config))


async def _daemon(config: ServerConfig) -> None:
    daemon = Daemon(config)
    with stop_on_signals(daemon.stop):
        await daemon.run()


async def _bare(config: ServerConfig) -> None:
    server = aio.server(options=serving.OPTIONS)
    server.add_generic_rpc_handlers((Bare(),))
    if config.tls is None:
        server.add_insecure_port(config.listen)
    else:
        pair = (config.tls.key.read_bytes(), config.tls.certificate.read_bytes())
        server.add_secure_port(config.listen, grpc.ssl_server_credentials([pair]))
    await server.start()
    stopped = asyncio.Event()
    with stop_on_signals(stopped.set):
        await stopped.wait()
    await server.stop(0)


if __name__ == "__main__":
    typer.run(main)
