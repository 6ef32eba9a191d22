"""Routes a call to local services, to the leader, or refuses it, at a port that several daemons may share."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import grpc
from typing_extensions import override

from fedplat_server.errors import Code, ConfigError, RefusedError
from fedplat_server.rpc import interceptor
from fedplat_server.rpc.context import ServedCall
from fedplat_server.rpc.interceptor import Behavior, Handler, StartedRequests


class Permit(Protocol):
    """The permission of a call to send its first message."""

    async def first(self, requests: AsyncIterator[Any]) -> Any:
        """Receive the first message. Raises `RefusedError`."""
        ...


Admit = Callable[[str, ServedCall], AbstractAsyncContextManager[Permit]]
"""A function of a call's method and context that admits it, or raises `RefusedError`, before a message is received."""


class InFlightCalls:
    """The open calls of a route. When the route ends, all of them end with UNAVAILABLE (NO_LEADER): retry."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cancelled: set[asyncio.Task[Any]] = set()
        self._is_over = False
        self._none_left = asyncio.Event()

    @contextlib.contextmanager
    def track(self) -> Generator[None]:
        """Track a part of a call that runs in this task. Raises `RefusedError` when the route has ended."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_over:
            raise RefusedError(Code.NO_LEADER)
        cancelling = task.cancelling()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # As in asyncio.Timeout: a concurrent cancellation of this task by other code must still take effect.
            if task in self._cancelled and task.uncancel() <= cancelling:
                raise RefusedError(Code.NO_LEADER) from None
            raise
        finally:
            self._tasks.discard(task)
            self._cancelled.discard(task)
            if self._is_over and not self._tasks:
                self._none_left.set()

    def end(self) -> None:
        """End all calls, and refuse new ones."""
        self._is_over = True
        for task in self._tasks:
            self._cancelled.add(task)
            task.cancel()
        if not self._tasks:
            self._none_left.set()

    async def wait_until_none(self) -> None:
        """Wait until all calls have ended."""
        await self._none_left.wait()


class Route(Protocol):
    """The current destination of calls."""

    calls: InFlightCalls

    def handler(self, details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the handler of a call; None for an unknown method."""
        ...


class NoLeader(Route):
    """The route without a leader: refuses all calls with NO_LEADER, which callers retry.

    `explain` returns the reason, as far as this daemon knows.
    """

    def __init__(self, explain: Callable[[], str]) -> None:
        self.calls = InFlightCalls()
        self._explain = explain

    @override
    def handler(self, details: grpc.HandlerCallDetails) -> Handler | None:
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: AsyncIterator[bytes], context: ServedCall) -> AsyncGenerator[bytes]:
        raise RefusedError(Code.NO_LEADER, self._explain())
        yield b""  # makes this function a generator


class LocalRoute(Route):
    """The route to this daemon's own services, for calls that `admit` admits."""

    def __init__(self, handlers: Sequence[grpc.GenericRpcHandler], admit: Admit) -> None:
        self.calls = InFlightCalls()
        self._handlers = handlers
        self._admit = admit
        self._wrapped: dict[str, Handler] = {}

    @override
    def handler(self, details: grpc.HandlerCallDetails) -> Handler | None:
        cached = self._wrapped.get(details.method)  # otherwise each open call would hold its own handler
        if cached is not None:
            return cached
        for generic in self._handlers:
            if (handler := generic.service(details)) is not None:
                wrapped = _wrap(handler, self.calls, functools.partial(self._admit, details.method))
                return self._wrapped.setdefault(details.method, wrapped)
        return None


class Router(grpc.GenericRpcHandler):
    """A gRPC handler that passes every call of `services` to the current route.

    While there is no leader, it refuses calls with the reason that `explain` returns.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._prefixes = tuple(f"/{name}/" for name in services)
        self.explain: Callable[[], str] = str
        self.route: Route = NoLeader(lambda: self.explain())

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        if not handler_call_details.method.startswith(self._prefixes):
            return None
        return self.route.handler(handler_call_details)

    def set_route(self, route: Route) -> InFlightCalls:
        """Set the route for new calls; end the open calls of the old route and return them."""
        old, self.route = self.route, route
        old.calls.end()
        return old.calls

    def end_route(self) -> InFlightCalls:
        """Refuse new calls, since there is no leader; end the open calls of the old route and return them."""
        return self.set_route(NoLeader(lambda: self.explain()))


class Collector:
    """A stand-in for a gRPC server: collects the handlers that generated code registers."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Collect handlers."""
        self.handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """Ignore the handlers: they are the generic ones, in another form for servers that register methods."""


def _wrap(
    handler: Handler, calls: InFlightCalls, admit: Callable[[ServedCall], AbstractAsyncContextManager[Permit]]
) -> Handler:
    """Return a handler that admits each call before it receives a message, and tracks it until it ends."""
    return interceptor.wrap_handler(
        handler,
        handler.request_deserializer,
        functools.partial(_wrap_returning, calls=calls, admit=admit),
        functools.partial(_wrap_yielding, calls=calls, admit=admit),
    )


def _wrap_returning(
    inner: Callable[[Any, Any], Awaitable[Any]],
    calls: InFlightCalls,
    admit: Callable[[ServedCall], AbstractAsyncContextManager[Permit]],
) -> Behavior:
    async def call(requests: AsyncIterator[Any], context: ServedCall) -> Any:
        with calls.track():
            async with admit(context) as permit:
                return await inner(StartedRequests(await permit.first(requests), requests), context)

    return call


def _wrap_yielding(
    inner: Callable[[Any, Any], AsyncGenerator[Any]],
    calls: InFlightCalls,
    admit: Callable[[ServedCall], AbstractAsyncContextManager[Permit]],
) -> Behavior:
    async def call(requests: AsyncIterator[Any], context: ServedCall) -> AsyncGenerator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            with calls.track():
                permit = await stack.enter_async_context(admit(context))
                started = StartedRequests(await permit.first(requests), requests)
            responses = await stack.enter_async_context(contextlib.aclosing(inner(started, context)))
            while True:
                with calls.track():  # not while gRPC sends a response, which must not be cancelled
                    try:
                        response = await anext(responses)
                    except StopAsyncIteration:
                        return
                yield response

    return call


class PortReservation:
    """An address that this process has bound but does not listen on: it receives no connections yet."""

    def __init__(self, address: str, option: str, *, shared: bool) -> None:
        """Bind the address. Raises `ConfigError` if it is unavailable or, with `shared`, used without sharing."""
        host, _, port = address.rpartition(":")
        try:
            infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, kind, protocol, _, socket_address = infos[0]
            with contextlib.ExitStack() as on_error:
                self._socket = on_error.enter_context(socket.socket(family, kind, protocol))
                # As gRPC does: old connections of a daemon that has ended do not block the port.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
                self._socket.bind(socket_address)
                on_error.pop_all()
        except OSError as exc:
            raise ConfigError(
                f"cannot listen on {address}: {exc.strerror}; choose another with {option} HOST:PORT"
                + (", or run all daemons there with --share-port" if shared else ", one for each daemon")
            ) from exc

    def release(self) -> None:
        """Close the socket."""
        self._socket.close()
