"""A network without sockets: stands in for `grpc.aio`'s servers and channels, between simulated processes.

A call is a pair of one-way streams of messages. Each message takes its time, in order. A stream breaks if the network
drops one of its messages, or if one of its ends dies: the other end learns of it some time later, and does not know
what arrived. Handlers, interceptors, deserializers and stubs are those of production.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import grpc
from grpc import aio

from support.fault_simulation.virtual import PROCESS, VirtualLoop

Metadata = tuple[tuple[str, str | bytes], ...]
OK = grpc.StatusCode.OK


class Weather(NamedTuple):
    """What happens to messages: how many are dropped, and how many are late."""

    drops: float = 0.0
    late: float = 0.02
    longest_s: float = 1.0


class _Details(NamedTuple):
    method: str
    invocation_metadata: Metadata


class Network:
    """All addresses, and what is between them. Places are addresses of servers and names of clients."""

    def __init__(self, loop: VirtualLoop, seed: int, trace: Callable[[str], None]) -> None:
        self.loop = loop
        self.trace = trace
        self.servers: dict[str, Server] = {}
        self.weather = Weather()
        self.cuts: set[frozenset[str]] = set()
        self.happened: Counter[str] = Counter()
        self.rng = random.Random(f"network {seed}")
        self.num_calls = self.num_channels = 0

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes between two places; "*" stands for all places."""
        return bool(self.cuts) and any(
            frozenset(pair) in self.cuts for pair in ((one, other), (one, "*"), (other, "*"))
        )

    def delay_s(self) -> float:
        if self.rng.random() < self.weather.late:
            return self.rng.uniform(0.0, self.weather.longest_s)
        return self.rng.uniform(0.0005, 0.005)

    def make_server(self, interceptors: Sequence[Any] = (), **_: object) -> Server:
        return Server(self, interceptors)

    def make_channel(self, address: str, *_: object, **__: object) -> Channel:
        process = PROCESS.get()
        return Channel(self, process.name if process is not None else "client", address)


class Stream:
    """Messages from one end of a call to the other, which waits for them with `read`."""

    def __init__(self, call: Call, origin: str, target: str) -> None:
        self._call = call
        self._places = (origin, target)
        self._arrived: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._last = 0.0
        self.is_closed = self._is_broken = False

    def send(self, message: Any) -> None:
        """Sends a message, or `aio.EOF`. The receiver gets it with a delay, or the call breaks."""
        network = self._call.network
        if self._is_broken:
            return
        if network.is_cut(*self._places) or network.rng.random() < network.weather.drops:
            network.happened["messages lost"] += 1
            self._break()
            return
        self._last = max(self._last + 1e-6, network.loop.time() + network.delay_s())
        network.loop.call_at(self._last, self._arrive, message, context=contextvars.Context())

    def _break(self) -> None:
        self._is_broken = True
        self._call.break_soon()

    def _arrive(self, message: Any) -> None:
        if self._is_broken:
            return
        if self._call.network.is_cut(*self._places):
            self._break()
        elif not self.is_closed and not (self is self._call.responses and self._call.take(message)):
            self._arrived.append(message)
            self._wake()

    def close(self) -> None:
        """Ends the stream at once: `read` returns what has arrived, and then `aio.EOF`."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> Any:
        while not self._arrived and not self.is_closed:
            self._waiter = self._call.network.loop.create_future()
            await self._waiter
        return self._arrived.popleft() if self._arrived else aio.EOF


class Call:
    """A call as its caller sees it: what `grpc.aio` returns for a call of any kind."""

    def __init__(self, channel: Channel, method: str, metadata: Metadata) -> None:
        network = self.network = channel.network
        network.num_calls += 1
        self.method, self.metadata = method, metadata
        self.requests = Stream(self, channel.origin, channel.address)
        self.responses = Stream(self, channel.address, channel.origin)
        self.peer = channel.peer
        self.context = contextvars.copy_context()
        self.status: asyncio.Future[tuple[grpc.StatusCode, str, Metadata]] = network.loop.create_future()
        self.initial: asyncio.Future[Metadata] = network.loop.create_future()
        self.serving: asyncio.Task[None] | None = None
        self.decode: Callable[[bytes], Any] = bytes
        self._feeding: asyncio.Task[None] | None = None
        self._answer: asyncio.Task[Any] | None = None

    # --- the network's side ---

    def break_soon(self) -> None:
        """Both ends learn, at times of their own, that the connection is gone."""
        loop, rng = self.network.loop, self.network.rng
        loop.call_later(rng.uniform(0.01, 5.0), self._fail, context=contextvars.Context())
        loop.call_later(rng.uniform(0.01, 5.0), self.cancel_serving, context=contextvars.Context())

    def _fail(self) -> None:
        self.end(grpc.StatusCode.UNAVAILABLE, "the connection broke", ())

    def end(self, code: grpc.StatusCode, details: str, trailing: Metadata) -> None:
        """The status arrives."""
        if not self.status.done():
            self.network.trace(f"{self.method.rpartition('/')[2]} {code.name}")
            self.status.set_result((code, details, trailing))
            self.responses.close()
            if not self.initial.done():
                self.initial.set_result(())
            if self._feeding is not None:
                self._feeding.cancel()

    def take(self, message: Any) -> bool:
        """Takes in what is not a message: metadata and the status."""
        if isinstance(message, _Status):
            self.end(*message)
        elif not self.initial.done():
            self.initial.set_result(message.metadata if isinstance(message, _Initial) else ())
        return isinstance(message, _Status | _Initial)

    def cancel_serving(self) -> None:
        if self.serving is not None:
            self.serving.cancel()

    # --- the caller's side ---

    def feed(self, requests: Any, encode: Callable[[Any], bytes]) -> Call:
        """Sends requests: one, or those of an iterator."""
        if hasattr(requests, "__aiter__"):
            self._feeding = self.network.loop.create_task(self._feed(requests, encode))
            return self
        for each in requests if isinstance(requests, Iterable) else [requests]:
            self.requests.send(encode(each))
        self.requests.send(aio.EOF)
        return self

    async def _feed(self, requests: AsyncIterator[Any], encode: Callable[[Any], bytes]) -> None:
        async for each in requests:
            self.requests.send(encode(each))
        self.requests.send(aio.EOF)

    def cancel(self) -> bool:
        if self.status.done():
            return False
        self.end(grpc.StatusCode.CANCELLED, "cancelled by the caller", ())
        delay_s = self.network.delay_s()
        self.network.loop.call_later(delay_s, self.cancel_serving, context=contextvars.Context())
        return True

    async def initial_metadata(self) -> Metadata:
        return await asyncio.shield(self.initial)

    async def trailing_metadata(self) -> Metadata:
        return (await asyncio.shield(self.status))[2]

    async def read(self) -> Any:
        message = await self.responses.read()
        if message is not aio.EOF:
            return self.decode(message)
        code, details, trailing = await asyncio.shield(self.status)
        if code is not OK:
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), details)
        return aio.EOF

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not aio.EOF:
            yield message

    def __await__(self) -> Any:
        return self._first().__await__()

    async def _first(self) -> Any:
        try:
            message = await self.read()
            await asyncio.shield(self.status)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.status.result()[0] is not OK:
            await self.read()
        return message


class Channel:
    """Stands in for `aio.Channel`."""

    def __init__(self, network: Network, origin: str, address: str) -> None:
        self.network, self.origin, self.address = network, origin, address
        network.num_channels += 1
        self.peer = f"ipv4:10.1.0.1:{1024 + network.num_channels % 60000}"

    def _method(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: object
    ) -> Callable[..., Call]:
        def start(requests: Any = None, *, metadata: Iterable[Any] | None = None, **_: object) -> Call:
            call = Call(self, method, tuple((key, value) for key, value in metadata or ()))
            call.decode = response_deserializer or bytes
            self.network.loop.call_later(self.network.delay_s(), self._connect, call, context=contextvars.Context())
            return call.feed(requests, request_serializer or bytes)

        return start

    unary_unary = unary_stream = stream_unary = stream_stream = _method

    def _connect(self, call: Call) -> None:
        server = self._server()
        if server is None:
            call.break_soon()
        else:
            server.begin(call)

    def _server(self) -> Server | None:
        found = self.network.servers.get(self.address)
        cut = found is None or not found.process.is_alive or self.network.is_cut(self.origin, self.address)
        return None if cut else found

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        del try_to_connect
        connectivity = grpc.ChannelConnectivity
        return connectivity.TRANSIENT_FAILURE if self._server() is None else connectivity.READY

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self.get_state() is last:
            await asyncio.sleep(0.5)

    async def close(self) -> None:
        pass


class Context:
    """Stands in for `aio.ServicerContext`."""

    def __init__(self, call: Call, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> None:
        self._call = call
        self._decode, self._encode = decode, encode
        self._code: grpc.StatusCode | None = None
        self._details, self._trailing = "", ()
        self.callbacks: list[Callable[[Any], None]] = []

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def peer(self) -> str:
        return self._call.peer

    def auth_context(self) -> dict[str, Any]:
        return {}

    def time_remaining(self) -> None:
        return None

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.callbacks.append(callback)

    def set_trailing_metadata(self, metadata: Iterable[Any]) -> None:
        self._trailing = tuple((key, value) for key, value in metadata)

    async def send_initial_metadata(self, metadata: Iterable[Any]) -> None:
        given = tuple((key, value) for key, value in metadata)
        self._call.responses.send(_Initial(given))

    async def read(self) -> Any:
        message = await self._call.requests.read()
        return message if message is aio.EOF else self._decode(message)

    async def write(self, message: Any) -> None:
        self._call.responses.send(self._encode(message))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> None:
        self._code, self._details, self._trailing = code, details, tuple(trailing_metadata)
        raise aio.AbortError

    def finish(self, code: grpc.StatusCode) -> None:
        """Sends the status."""
        self._call.responses.send(_Status(self._code or code, self._details, self._trailing))


class _Initial(NamedTuple):
    metadata: Metadata


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str
    trailing: Metadata


class Server:
    """Stands in for `aio.Server`."""

    def __init__(self, network: Network, interceptors: Sequence[Any]) -> None:
        process = PROCESS.get()
        assert process is not None
        self.network, self.process = network, process
        self._interceptors = interceptors
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._context = contextvars.copy_context()
        self._calls: dict[Call, None] = {}
        self._address = ""
        process.on_death.append(self._die)

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._handlers.extend(handlers)

    def add_insecure_port(self, address: str) -> int:
        self._address = address
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        self.network.servers[self._address] = self

    async def stop(self, grace_s: float | None) -> None:
        self._leave()
        if self._calls and grace_s:
            tasks = [call.serving for call in self._calls if call.serving is not None]
            await asyncio.wait(tasks, timeout=grace_s)
        for call in list(self._calls):
            call.cancel_serving()

    def _leave(self) -> None:
        if self.network.servers.get(self._address) is self:
            del self.network.servers[self._address]

    def _die(self) -> None:
        self._leave()
        for call in list(self._calls):
            call.serving = None
            call.break_soon()

    def begin(self, call: Call) -> None:
        """Serves a call in the server's process."""
        context = self._context.copy()
        call.serving = self.network.loop.create_task(self._serve(call), context=context)
        self._calls[call] = None
        call.serving.add_done_callback(lambda _: self._calls.pop(call, None), context=context)

    async def _serve(self, call: Call) -> None:
        handler = await self._find(_Details(call.method, call.metadata))
        context = Context(call, handler.request_deserializer or bytes, handler.response_serializer or bytes)
        try:
            made = (handler.stream_stream if handler.response_streaming else handler.stream_unary)(None, context)
            if hasattr(made, "__aiter__"):
                async with contextlib.aclosing(made):
                    async for each in made:
                        await context.write(each)
            elif (response := await made) is not None:
                await context.write(response)
            context.finish(OK)
        except aio.AbortError:
            context.finish(grpc.StatusCode.UNKNOWN)
        except asyncio.CancelledError:
            context.finish(grpc.StatusCode.CANCELLED)
            raise
        finally:
            for callback in context.callbacks:
                callback(context)

    async def _find(self, details: _Details) -> Any:
        async def generic(details: Any) -> Any:
            return next(found for each in self._handlers if (found := each.service(details)) is not None)

        for each in self._interceptors:
            return await each.intercept_service(generic, details)
        return await generic(details)
