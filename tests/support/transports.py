"""The two transports of a server, for tests that attack either."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast

from grpc import aio

from support.http_channel import HttpPeer, HttpStubChannel
from support.ports import free_port

Name: TypeAlias = Literal["grpc", "http"]
_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))


@dataclasses.dataclass(frozen=True)
class Transport:
    """A transport of a server without TLS: the server's options, and `host:port` if it is not that of gRPC."""

    name: Name
    options: tuple[str, ...] = ()
    http: str = ""

    @classmethod
    def of(cls, name: Name) -> Transport:
        if name == "grpc":
            return cls(name)
        http = f"127.0.0.1:{free_port()}"
        return cls(name, ("--http-listen", http, "--http-address", http, "--http-operators"), http)

    def address(self, grpc: str) -> str:
        """Where calls go to a server with that address of gRPC."""
        return self.http or grpc


def connect(address: str, name: Name, options: Sequence[tuple[str, int]] = _OPTIONS) -> aio.Channel:
    """A channel for the stubs of gRPC's asynchronous API."""
    if name == "http":
        return cast(Any, HttpStubChannel(HttpPeer(int(address.rpartition(":")[2]))))
    return aio.insecure_channel(address, options=options)
