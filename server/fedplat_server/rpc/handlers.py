"""Wraps gRPC method handlers of any arity as handlers that accept a stream of requests.

gRPC receives the request of a unary method in full before it calls the handler. The handler of a streaming method reads
requests itself, so a call can be checked before its first message is in memory. On the wire both are the same.
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
"""A handler's function of its request or requests and the context; it returns a response, or yields several."""
Wrapper: TypeAlias = Callable[[Behavior], Behavior]


class StartedRequests:
    """The requests of a call whose first request has been received."""

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
    """Return a handler of the same method that accepts a stream of requests, with a wrapped behavior.

    `wrap_yielding` is for behaviors that are async generators, `wrap_returning` for all others: those that return their
    response, and those that write their responses to the context, as the health service does. The wrapper must call
    the behavior with `StartedRequests`; a behavior of one request receives the first of them.
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
