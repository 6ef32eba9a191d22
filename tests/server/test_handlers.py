"""Handlers of every arity, wrapped as ones that take a stream of requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from fedplat_server.rpc import interceptor
from fedplat_server.rpc.interceptor import StartedRequests


async def one(request: str, context: object) -> str:
    return request


async def joined(requests: AsyncIterator[str], context: object) -> str:
    return "".join([request async for request in requests])


async def letters(request: str, context: object) -> AsyncIterator[str]:
    for letter in request:
        yield letter


async def doubled(requests: AsyncIterator[str], context: object) -> AsyncIterator[str]:
    async for request in requests:
        yield 2 * request


def returning(inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def call(requests: AsyncIterator[str], context: object) -> str:
        return f"<{await inner(StartedRequests(await anext(requests), requests), context)}>"

    return call


def yielding(inner: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def call(requests: AsyncIterator[str], context: object) -> AsyncIterator[str]:
        async for response in inner(StartedRequests(await anext(requests), requests), context):
            yield f"<{response}>"

    return call


async def stream(*messages: str) -> AsyncIterator[str]:
    for message in messages:
        yield message


@pytest.mark.parametrize(
    ("handler", "requests", "responses"),
    [
        (grpc.unary_unary_rpc_method_handler(one), ["ab"], "<ab>"),
        (grpc.stream_unary_rpc_method_handler(joined), ["ab", "cd"], "<abcd>"),
        (grpc.unary_stream_rpc_method_handler(letters), ["ab"], ["<a>", "<b>"]),
        (grpc.stream_stream_rpc_method_handler(doubled), ["ab", "cd"], ["<abab>", "<cdcd>"]),
        (grpc.unary_stream_rpc_method_handler(one), ["ab"], "<ab>"),  # writes its responses, if any, to the context
    ],
)
async def test_every_arity(handler: Any, requests: list[str], responses: str | list[str]) -> None:
    wrapped = interceptor.wrap_handler(handler, bytes.decode, returning, yielding)
    assert wrapped.request_streaming
    assert wrapped.response_streaming == handler.response_streaming
    assert wrapped.request_deserializer is bytes.decode
    behavior = wrapped.stream_stream or wrapped.stream_unary
    call = behavior(stream(*requests), None)
    assert (await call if isinstance(responses, str) else [response async for response in call]) == responses
