"""Wraps gRPC method handlers, whatever their arity, as handlers that take a stream of requests.

gRPC receives the request of a unary method in full before it calls the handler. A handler that takes a stream receives
a request when it asks for one, so a call can be checked before its first message is in memory. On the wire both are
the same.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from grpc import aio

Context: TypeAlias = "aio.ServicerContext[Any, Any]"  # a string: generic for the type checker only
Handler: TypeAlias = Any  # grpc.RpcMethodHandler, generic for the type checker only
Behavior: TypeAlias = Callable[[Any, Any], Any]
"""What a handler does: takes its request or requests and the context, and returns its response, or yields several."""
Wrapper: TypeAlias = Callable[[Behavior], Behavior]


class StartedRequests:
    """The requests of a call, the first of which has been received."""

    def __init__(self, first: Any, rest: AsyncIterator[Any]) -> None:
        self.first = first
        self._rest = rest
        self._is_at_start = True

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._is_at_start:
            self._is_at_start = False
            return self.first
        return await anext(self._rest)


def wrap(
    handler: Handler, deserialize: Callable[[bytes], Any] | None, wrap_returning: Wrapper, wrap_yielding: Wrapper
) -> Handler:
    """Return a handler of the same method that takes a stream of requests, with a wrapped behavior.

    `wrap_yielding` is for behaviors that are async generators, `wrap_returning` for all others: those that return their
    response, and those that write their responses to the context, as the health service does. A behavior that takes
    one request expects `StartedRequests` from its wrapper, and gets the first of them.
    """
    behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    wrapper = wrap_yielding if inspect.isasyncgenfunction(behavior) else wrap_returning
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    return make(
        wrapper(behavior if handler.request_streaming else _on_first(behavior)),
        request_deserializer=deserialize,
        response_serializer=handler.response_serializer,
    )


def _on_first(behavior: Behavior) -> Behavior:
    def on_first(requests: StartedRequests, context: Any) -> Any:
        return behavior(requests.first, context)

    return on_first
