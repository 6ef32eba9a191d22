"""Where a call goes: to the services here, to the daemon that leads, or nowhere. Routes change; the port stays."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import grpc

from fedplat_server.errors import Code, RefusedError
from fedplat_server.rpc import handlers
from fedplat_server.rpc.handlers import Behavior, Context, Handler, StartedRequests


class Permit(Protocol):
    """The leave of a call to send its first message."""

    async def first(self, requests: AsyncIterator[Any]) -> Any:
        """Receive the first message."""
        ...


Admit = Callable[[str, Any], AbstractAsyncContextManager[Permit]]
"""Lets a call in, given its method and its context, or raises `RefusedError`; before any message is received."""


class InFlightCalls:
    """The calls under way on a route. When the route ends, all of them do: UNAVAILABLE, try again."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._is_over = False
        self._none_left = asyncio.Event()

    @contextlib.contextmanager
    def one(self) -> Generator[None]:
        """A piece of a call's work in this task; raises `RefusedError` when the route has ended."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_over:
            raise RefusedError(Code.NO_LEADER)
        cancelling = task.cancelling()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # As asyncio.Timeout does it: whoever else cancels this task too shall succeed.
            if task in self._cut and task.uncancel() <= cancelling:
                raise RefusedError(Code.NO_LEADER) from None
            raise
        finally:
            self._tasks.discard(task)
            self._cut.discard(task)
            if self._is_over and not self._tasks:
                self._none_left.set()

    def end(self) -> None:
        """Ends all calls, and those that still come."""
        self._is_over = True
        for task in self._tasks:
            self._cut.add(task)
            task.cancel()
        if not self._tasks:
            self._none_left.set()

    async def wait_until_none(self) -> None:
        """Returns when every call has come to its end."""
        await self._none_left.wait()


class Route(Protocol):
    """Where calls go for a while."""

    calls: InFlightCalls

    def handler(self, details: grpc.HandlerCallDetails) -> Handler | None:
        """Who takes a call; None for an unknown method."""
        ...


class NoLeader:
    """Nobody leads."""

    def __init__(self) -> None:
        self.calls = InFlightCalls()

    def handler(self, details: grpc.HandlerCallDetails) -> Handler | None:
        """Tells the caller to come back later."""
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes]:
    raise RefusedError(Code.NO_LEADER)
    yield b""  # makes it a generator


class LocalRoute:
    """This daemon takes the calls that `admit` lets pass: by its own services."""

    def __init__(self, handlers: Sequence[grpc.GenericRpcHandler], admit: Admit) -> None:
        self.calls = InFlightCalls()
        self._handlers = handlers
        self._admit = admit
        self._wrapped: dict[str, Handler] = {}

    def handler(self, details: grpc.HandlerCallDetails) -> Handler | None:
        """The method of a service: the same for all its calls, which would hold one each otherwise."""
        known = self._wrapped.get(details.method)
        if known is not None:
            return known
        for generic in self._handlers:
            if (found := generic.service(details)) is not None:
                wrapped = _wrap(found, self.calls, functools.partial(self._admit, details.method))
                return self._wrapped.setdefault(details.method, wrapped)
        return None


class Router(grpc.GenericRpcHandler):
    """Takes every call of some services, and lets the present route see to it."""

    def __init__(self, services: Sequence[str]) -> None:
        self._prefixes = tuple(f"/{name}/" for name in services)
        self.route: Route = NoLeader()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Who takes a call."""
        if not handler_call_details.method.startswith(self._prefixes):
            return None
        return self.route.handler(handler_call_details)

    def set_route(self, route: Route) -> InFlightCalls:
        """Lets calls go another way from now on; those under way are ended and returned."""
        old, self.route = self.route, route
        old.calls.end()
        return old.calls


class Collector:
    """Stands for a gRPC server while the generated code registers a service, and keeps what it registers."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Keeps the handlers."""
        self.handlers.extend(generic_rpc_handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: object) -> None:
        """The same handlers once more, for servers that know methods in advance."""


def _wrap(
    handler: Handler, calls: InFlightCalls, admit: Callable[[Any], AbstractAsyncContextManager[Permit]]
) -> Handler:
    """Return a handler that admits each call before it receives a message, and counts it while it lasts."""
    return handlers.wrap(
        handler,
        handler.request_deserializer,
        functools.partial(_wrap_returning, calls=calls, admit=admit),
        functools.partial(_wrap_yielding, calls=calls, admit=admit),
    )


def _wrap_returning(
    inner: Callable[[Any, Any], Awaitable[Any]],
    calls: InFlightCalls,
    admit: Callable[[Any], AbstractAsyncContextManager[Permit]],
) -> Behavior:
    async def call(requests: AsyncIterator[Any], context: Context) -> Any:
        with calls.one():
            async with admit(context) as turn:
                return await inner(StartedRequests(await turn.first(requests), requests), context)

    return call


def _wrap_yielding(
    inner: Callable[[Any, Any], AsyncGenerator[Any]],
    calls: InFlightCalls,
    admit: Callable[[Any], AbstractAsyncContextManager[Permit]],
) -> Behavior:
    async def call(requests: AsyncIterator[Any], context: Context) -> AsyncGenerator[Any]:
        async with contextlib.AsyncExitStack() as stack:
            with calls.one():
                turn = await stack.enter_async_context(admit(context))
                started = StartedRequests(await turn.first(requests), requests)
            responses = await stack.enter_async_context(contextlib.aclosing(inner(started, context)))
            while True:
                with calls.one():  # not while gRPC sends a response: it must not be cancelled there
                    try:
                        response = await anext(responses)
                    except StopAsyncIteration:
                        return
                yield response

    return call
