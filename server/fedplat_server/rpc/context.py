"""What handlers use of a call, over gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Never, Protocol

import grpc


class CallContext(Protocol):
    """The part of `grpc.aio.ServicerContext` that handlers of methods use."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the metadata of the caller."""
        ...

    def peer(self) -> str:
        """Return the caller's address in the form of gRPC, such as `ipv4:10.0.0.7:4242`."""
        ...

    def auth_context(self) -> Mapping[str, Any]:
        """Return what TLS has proven of the caller."""
        ...

    def add_done_callback(self, callback: Any) -> None:
        """Call a function when the call has ended."""
        ...


class ServedCall(CallContext, Protocol):
    """The part that routes and interceptors use besides: they receive the messages and end the call."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the caller's deadline; None without one."""
        ...

    async def read(self) -> Any:
        """Return the next message, or `grpc.aio.EOF`."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Never:
        """End the call with a status: raise `grpc.aio.AbortError`."""
        ...

    def code(self) -> grpc.StatusCode:
        """Return the status with which the call was aborted."""
        ...

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Send metadata before the response."""
        ...

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """Set the metadata that end the call."""
        ...
