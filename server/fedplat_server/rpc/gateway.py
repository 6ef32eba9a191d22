"""Forwards calls to the leader, byte for byte: messages, metadata, deadline, cancellation, status.

A message is read from one side only after the other side accepted the previous one. So a slow receiver slows down its
sender (back pressure), and a gateway keeps one message of each direction in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import Any, NamedTuple, cast

import grpc
from grpc import aio
from typing_extensions import override

from fedplat import wire
from fedplat.wire import auth, proxies
from fedplat_server import config, errors, logs
from fedplat_server.auth import addresses
from fedplat_server.auth.addresses import ForwardedCall
from fedplat_server.messages import streams
from fedplat_server.messages.streams import UploadMemory
from fedplat_server.records.lease import Lease
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.context import CallContext, ServedCall
from fedplat_server.rpc.router import InFlightCalls, Route, Router

_OPTIONS = (
    *wire.CHANNEL_OPTIONS,
    # Callers must not wait for a leader that is cut off much longer than its lease is valid.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
)
# The statuses of a broken connection; the leader's own statuses have an error code in the trailing metadata.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
)


def connect(address: str, tls: config.TlsFiles | None) -> aio.Channel:
    """Return a channel to the leader, with TLS if this daemon has certificates: all daemons share an authority."""
    none = grpc.Compression.NoCompression
    options = (*_OPTIONS, *proxies.channel_options(address))
    if tls is None:
        return aio.insecure_channel(address, options=options, compression=none)
    trusted = tls.ca.read_bytes() if tls.ca is not None else None
    return aio.secure_channel(address, grpc.ssl_channel_credentials(trusted), options=options, compression=none)


CALLS_OF_CONNECTION = 90
"""Calls of one connection to the leader, which accepts `serving.MAX_STREAMS`; beyond them another one is opened."""


class GatewayOptions(NamedTuple):
    """The settings of a gateway.

    `client_of` returns the client of the certificate of a call's connection ("": none), `tls` has the files for
    connections to other daemons, and `memory` the budgets for updates that pass through.
    """

    tls: config.TlsFiles | None
    client_of: Callable[[CallContext], str]
    memory: UploadMemory


class Channels:
    """The connections to the leader: a call uses the first with a free stream, so few calls need only one."""

    def __init__(self, make: Callable[[], aio.Channel]) -> None:
        self._make = make
        self.first = make()
        self._num_calls: dict[aio.Channel, int] = {self.first: 0}

    @contextlib.contextmanager
    def acquire(self) -> Generator[aio.Channel]:
        """Yield a connection for one call."""
        for channel, num_calls in self._num_calls.items():  # noqa: B007 -- used after the loop
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
        """Close all connections."""
        for channel in self._num_calls:
            await channel.close()


class Gateway(Route):
    """The route to the leader."""

    def __init__(self, lease: Lease, name: str, options: GatewayOptions) -> None:
        self.calls = InFlightCalls()
        self.lease = lease
        self._name = name
        self._client_of = options.client_of
        self._memory = options.memory
        self._channels = Channels(lambda: connect(lease.address, options.tls))

    @override
    def handler(self, details: grpc.HandlerCallDetails) -> interceptor.Handler | None:
        method = details.method

        async def call(requests: AsyncIterator[bytes], context: ServedCall) -> AsyncGenerator[bytes]:
            metadata = context.invocation_metadata() or ()
            if addresses.is_forwarded(metadata):  # another gateway takes this daemon for the leader
                raise errors.RefusedError(errors.Code.NO_LEADER)
            origin = ForwardedCall(self._name, self._client_of(context), context.peer())
            marked = addresses.add_forwarding(metadata, self.lease.secret, origin)
            admitted = asyncio.Event()
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(_translate_status(context))
                start = cast(Any, stack.enter_context(self._channels.acquire()).stream_stream)(method)
                started = start(_read_after(admitted, requests), timeout=context.time_remaining(), metadata=marked)
                outgoing = await stack.enter_async_context(_cancel_at_exit(started))
                with self.calls.track():
                    initial = await outgoing.initial_metadata()
                    await stack.enter_async_context(self._share(method))
                admitted.set()
                if initial:
                    await context.send_initial_metadata(tuple(initial))
                while True:
                    with self.calls.track():
                        response = await outgoing.read()
                    if response is aio.EOF:
                        break
                    yield response
                context.set_trailing_metadata(tuple(await outgoing.trailing_metadata() or ()))

        return grpc.stream_stream_rpc_method_handler(call)

    def _share(self, method: str) -> contextlib.AbstractAsyncContextManager[object]:
        """Hold the memory for the messages of a call while they pass through."""
        match method.rpartition("/")[2]:
            case "Upload":
                return self._memory.uploads.share(streams.UPLOAD_BYTES)
            case "Report":
                return self._memory.reports.share(interceptor.max_bytes(method))
            case _:
                return contextlib.nullcontext()

    async def watch(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Call `set_ready` with whether the leader is reachable, now and whenever that changes."""
        ready = grpc.ChannelConnectivity.READY
        while True:
            state = self._channels.first.get_state(try_to_connect=True)
            await set_ready(state is ready)
            await self._channels.first.wait_for_state_change(state)

    async def close(self) -> None:
        """End the open calls and close the connections."""
        self.calls.end()
        await self.calls.wait_until_none()
        await self._channels.close()


async def _read_after(admitted: asyncio.Event, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the messages of a call; receive none before the leader has admitted it."""
    await admitted.wait()
    async for request in requests:
        yield request


@contextlib.asynccontextmanager
async def _cancel_at_exit(outgoing: Any) -> AsyncGenerator[Any]:
    """Cancel a call to the leader once its caller is gone or has its response."""
    try:
        yield outgoing
    finally:
        outgoing.cancel()


@contextlib.asynccontextmanager
async def _translate_status(context: ServedCall) -> AsyncGenerator[None]:
    """End the call with the leader's status, or with NO_LEADER if the connection to the leader broke."""
    try:
        yield
    except aio.AioRpcError as exc:
        trailing = tuple(exc.trailing_metadata() or ())
        if exc.code() in _BROKEN and not any(key == auth.METADATA_CODE for key, _ in trailing):
            raise errors.RefusedError(errors.Code.NO_LEADER, "the connection to it broke") from exc
        await context.abort(exc.code(), exc.details() or "", trailing)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise errors.RefusedError(errors.Code.NO_LEADER, "the connection to it broke") from None


class Follower:
    """Routes the calls of this daemon to the leader; calls `set_ready` with whether they can be served."""

    def __init__(
        self, name: str, router: Router, set_ready: Callable[[bool], Awaitable[None]], options: GatewayOptions
    ) -> None:
        self._name = name
        self._options = options
        self._router = router
        self._set_ready = set_ready
        self._gateway: Gateway | None = None
        self._watch: asyncio.Task[None] | None = None

    async def follow(self, lease: Lease) -> None:
        """Forward calls to this leader. Ends open calls to an earlier leader."""
        previous = self._gateway
        if previous is not None and previous.lease.term == lease.term:
            return
        logs.get().info("another daemon leads; this one is a gateway to it", term=lease.term, leader=lease.address)
        gateway = Gateway(lease, self._name, self._options)
        self._router.set_route(gateway)
        await self._close_gateway()
        self._gateway = gateway
        self._watch = asyncio.create_task(gateway.watch(self._set_ready), name="leader watch")

    async def close(self) -> None:
        """Stop forwarding calls, and refuse them."""
        if self._gateway is not None:
            self._router.end_route()
            await self._close_gateway()

    async def _close_gateway(self) -> None:
        gateway, watch = self._gateway, self._watch
        self._gateway = self._watch = None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        if gateway is not None:
            await gateway.close()
