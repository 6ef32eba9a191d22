"""Passes calls on to the daemon that leads, byte for byte: messages, metadata, deadline, cancellation, status.

Each message is read from one side only after the other side took the one before, so that whoever is slow slows the
sender down, and a gateway keeps one message of each direction in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import Any, NamedTuple, cast

import grpc
from grpc import aio

from fedplat import auth, wire
from fedplat_server.auth import forwarding
from fedplat_server.auth.forwarding import ForwardedCall
from fedplat_server.config import TlsFiles
from fedplat_server.errors import Code, RefusedError
from fedplat_server.records.lease import Lease
from fedplat_server.rpc import interceptor, memory
from fedplat_server.rpc.handlers import Handler
from fedplat_server.rpc.memory import UploadMemory
from fedplat_server.rpc.routing.router import InFlightCalls

Context = Any  # aio.ServicerContext, generic for the type checker only
_OPTIONS = (
    ("grpc.max_receive_message_length", wire.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", wire.MAX_MESSAGE_BYTES),
    # A leader that is cut off must not keep callers waiting much longer than the lease does.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
# What the connection may say where the leader itself would have added its code.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
)


def connect(address: str, tls: TlsFiles | None) -> aio.Channel:
    """A channel to the leader, with TLS if this daemon has certificates: the authority of one is that of all."""
    none = grpc.Compression.NoCompression
    if tls is None:
        return aio.insecure_channel(address, options=_OPTIONS, compression=none)
    trusted = tls.ca.read_bytes() if tls.ca is not None else None
    return aio.secure_channel(address, grpc.ssl_channel_credentials(trusted), options=_OPTIONS, compression=none)


CALLS_OF_CONNECTION = 90
"""Calls of one connection to the leader, which takes `serving.MAX_STREAMS`; beyond them another one is made."""


class ForwardingRoute(NamedTuple):
    """What the daemon knows of callers of its own port.

    `client_of` tells which client the connection of a call is known to be of ("": none), `tls` how to speak to other
    daemons, and `memory` what updates may take here.
    """

    tls: TlsFiles | None
    client_of: Callable[[Context], str]
    memory: UploadMemory


class Channels:
    """Connections to the leader: the first that has room takes a call, so that a few callers need one."""

    def __init__(self, make: Callable[[], aio.Channel]) -> None:
        self._make = make
        self.first = make()
        self._num_calls: dict[aio.Channel, int] = {self.first: 0}

    @contextlib.contextmanager
    def one(self) -> Generator[aio.Channel]:
        """A connection for a call."""
        for channel, num_calls in self._num_calls.items():  # noqa: B007 -- the first with room
            if num_calls < CALLS_OF_CONNECTION:
                break
        else:
            channel = self._make()
        self._num_calls[channel] = self._num_calls.get(channel, 0) + 1
        try:
            yield channel
        finally:
            self._num_calls[channel] -= 1

    async def close(self) -> None:
        """Ends all connections."""
        for channel in self._num_calls:
            await channel.close()


class Gateway:
    """The route to a leader."""

    def __init__(self, lease: Lease, name: str, entrance: ForwardingRoute) -> None:
        self.calls = InFlightCalls()
        self.lease = lease
        self._name = name
        self._client_of = entrance.client_of
        self._memory = entrance.memory
        self._channels = Channels(lambda: connect(lease.address, entrance.tls))

    def handler(self, details: grpc.HandlerCallDetails) -> Handler | None:
        """Passes a call on."""
        method = details.method

        async def call(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes]:
            metadata = context.invocation_metadata() or ()
            if forwarding.is_marked(metadata):  # the daemon that sent it here was mistaken
                raise RefusedError(Code.NO_LEADER)
            origin = ForwardedCall(self._name, self._client_of(context), context.peer())
            marked = forwarding.add_to_metadata(metadata, self.lease.secret, origin)
            admitted = asyncio.Event()
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(_translate_status(context))
                start = cast(Any, stack.enter_context(self._channels.one()).stream_stream)(method)
                started = start(_after(admitted, requests), timeout=context.time_remaining(), metadata=marked)
                outgoing = await stack.enter_async_context(_cancelled_at_the_end(started))
                with self.calls.one():
                    initial = await outgoing.initial_metadata()
                    await stack.enter_async_context(self._share(method))
                admitted.set()
                if initial:
                    await context.send_initial_metadata(tuple(initial))
                while True:
                    with self.calls.one():
                        response = await outgoing.read()
                    if response is aio.EOF:
                        break
                    yield response
                context.set_trailing_metadata(tuple(await outgoing.trailing_metadata() or ()))

        return grpc.stream_stream_rpc_method_handler(call)

    def _share(self, method: str) -> contextlib.AbstractAsyncContextManager[object]:
        """The memory that a call may hold here while its messages go through."""
        match method.rpartition("/")[2]:
            case "Upload":
                return self._memory.uploads.share(memory.UPLOAD_BYTES)
            case "Report":
                return self._memory.reports.share(interceptor.max_bytes(method))
            case _:
                return contextlib.nullcontext()

    async def watch(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Tells whether the leader can be reached, now and whenever that changes."""
        ready = grpc.ChannelConnectivity.READY
        while True:
            state = self._channels.first.get_state(try_to_connect=True)
            await tell(state is ready)
            await self._channels.first.wait_for_state_change(state)

    async def close(self) -> None:
        """Ends the calls under way and the connection."""
        self.calls.end()
        await self.calls.wait_until_none()
        await self._channels.close()


async def _after(admitted: asyncio.Event, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """The messages of a call, none of which is received before the leader has let it in."""
    await admitted.wait()
    async for request in requests:
        yield request


@contextlib.asynccontextmanager
async def _cancelled_at_the_end(outgoing: Any) -> AsyncGenerator[Any]:
    """The caller is gone, or has its answer: nobody needs the rest."""
    try:
        yield outgoing
    finally:
        outgoing.cancel()


@contextlib.asynccontextmanager
async def _translate_status(context: Context) -> AsyncGenerator[None]:
    """Gives the caller the leader's status, or says that the leader is gone."""
    try:
        yield
    except aio.AioRpcError as exc:
        trailing = tuple(exc.trailing_metadata() or ())
        if exc.code() in _BROKEN and not any(key == auth.METADATA_CODE for key, _ in trailing):
            raise RefusedError(Code.NO_LEADER, "the connection to it broke") from exc
        await context.abort(exc.code(), exc.details() or "", trailing)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RefusedError(Code.NO_LEADER, "the connection to it broke") from None
