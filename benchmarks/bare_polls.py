"""Serve long polls of bare gRPC for Python, to measure the cost of waiting clients without the server's code.

python benchmarks/bare_polls.py HOST:PORT [--certificate FILE --key FILE]
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from grpc import aio

from fedplat_server.daemon import stop_on_signals
from fedplat_server.rpc import serving


class Bare(grpc.GenericRpcHandler):
    """`Wait` answers when `Release` is called, `Ask` at once."""

    def __init__(self) -> None:
        self._released = asyncio.Event()
        self._methods = {
            name: grpc.unary_unary_rpc_method_handler(handler)
            for name, handler in (("Wait", self.wait), ("Release", self.release), ("Ask", self.ask))
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call."""
        return self._methods[handler_call_details.method.rpartition("/")[2]]

    async def wait(self, request: bytes, context: Any) -> bytes:
        """Answer the long poll after `Release`."""
        await self._released.wait()
        return request

    async def release(self, request: bytes, context: Any) -> bytes:
        """End all long polls."""
        self._released.set()
        return request

    async def ask(self, request: bytes, context: Any) -> bytes:
        """Answer an empty call."""
        return request


def main(
    listen: str,
    certificate: Annotated[Path | None, typer.Option()] = None,
    key: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Serve until SIGTERM, with TLS if there is a certificate."""
    pair = (key.read_bytes(), certificate.read_bytes()) if key is not None and certificate is not None else None
    asyncio.run(serve(listen, pair))


async def serve(listen: str, pair: tuple[bytes, bytes] | None) -> None:
    """Serve with the daemon's gRPC options."""
    server = aio.server(options=serving.OPTIONS)
    server.add_generic_rpc_handlers((Bare(),))
    if pair is None:
        server.add_insecure_port(listen)
    else:
        server.add_secure_port(listen, grpc.ssl_server_credentials([pair]))
    await server.start()
    stopped = asyncio.Event()
    with stop_on_signals(stopped.set):
        await stopped.wait()
    await server.stop(0)


if __name__ == "__main__":
    typer.run(main)
