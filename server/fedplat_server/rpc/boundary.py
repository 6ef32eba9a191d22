"""Where exceptions become gRPC statuses: once, for every method of every service."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote, unquote

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from fedplat import identity, wire
from fedplat_server import logs
from fedplat_server.errors import BlobFullError, LeadershipLostError, StoreFullError, StoreUnavailableError
from fedplat_server.rpc.errors import Code, RefusedError

MAX_QUOTED = 6000
"""Bytes of a message as gRPC quotes it in the trailers, of which it takes 8 KiB in all."""
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

# A string: these classes are generic for the type checker only.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


class Boundary(aio.ServerInterceptor):
    """Turns what a handler raises into what a caller may know; the rest goes to the log, under a number."""

    def __init__(self) -> None:
        # Calls that wait would hold on to a handler each otherwise.
        self._translating = functools.lru_cache(maxsize=64)(_translating)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handler of a call."""
        handler: Any = await continuation(handler_call_details)
        return self._translating(handler, handler_call_details.method) if handler is not None else None


def _translating(handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler of a method; all of them take a stream: see `admission`."""
    codec: dict[str, Any] = {
        "request_deserializer": _decoder(handler.request_deserializer, max_bytes(method)),
        "response_serializer": handler.response_serializer,
    }
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(_unary(handler.stream_unary, method), **codec)
    assert handler.stream_stream, f"{method} would receive a message before anybody could refuse it"
    # A handler either yields its responses or writes them (that of the health service does).
    wrap = _stream if inspect.isasyncgenfunction(handler.stream_stream) else _unary
    return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream, method), **codec)


SMALL_BYTES = 128 * 2**10
"""The most that a message may have where the table below has no other number."""
_NEWCOMER_BYTES = 64 * 2**10
_MAX_BYTES = {
    "GetChallenge": _NEWCOMER_BYTES,
    "Enroll": _NEWCOMER_BYTES,
    "OpenSession": _NEWCOMER_BYTES,
    "Report": wire.INLINE_BYTES + SMALL_BYTES,
    "Upload": wire.MAX_REQUEST_BYTES,
    "UploadModel": wire.MAX_REQUEST_BYTES,
    "CreateJob": wire.MAX_REQUEST_BYTES,
}


def max_bytes(method: str) -> int:
    """The most bytes that a message of a method (`/service/name`) may have."""
    return _MAX_BYTES.get(method.rpartition("/")[2], SMALL_BYTES)


@dataclasses.dataclass(slots=True)
class Incoming:
    """The call that a task serves; `request` is its first message as it came, since that is what clients sign.

    `metadata` is read once, since gRPC copies it each time. `certified`: see `identity.callers.Call`; None until it is
    known.
    """

    method: str
    metadata: Mapping[str, str | bytes]
    request: bytes = b""
    certified: str | None = None

    @classmethod
    def of(cls, method: str, context: aio.ServicerContext[Any, Any]) -> Incoming:
        """Return a call of which no message was received yet."""
        return cls(method, {str(key): value for key, value in context.invocation_metadata() or ()})


INCOMING: ContextVar[Incoming] = ContextVar("incoming")


@dataclasses.dataclass(frozen=True, slots=True)
class _Received:
    """A message and its bytes; None if they were not decoded. gRPC itself would log a traceback for each."""

    message: Any
    data: bytes
    refused: RefusedError | None = None

    def well_formed(self) -> Any:
        if self.refused is not None:
            raise self.refused
        return self.message


def _decoder(decode: Callable[[bytes], Any] | None, limit_bytes: int) -> Callable[[bytes], _Received]:
    def decode_or_mark(data: bytes) -> _Received:
        if len(data) > limit_bytes:
            text = f"the message has {len(data)} bytes; expected at most {limit_bytes} for this method"
            return _Received(None, b"", RefusedError(Code.TOO_LARGE, text))
        if decode is None:  # a gateway passes bytes on
            return _Received(data, b"")
        try:
            return _Received(decode(data), data)
        except DecodeError:
            text = "its bytes are not a message of this protocol"
            return _Received(None, b"", RefusedError(Code.INVALID_REQUEST, text))

    return decode_or_mark


class _Messages:
    """The messages of a call, well-formed, each received when it is asked for.

    No generator: one that is left before its end, as that of a call with one message is, costs asyncio a task.
    """

    def __init__(self, context: aio.ServicerContext[Any, Any], incoming: Incoming) -> None:
        self._read: Callable[[], Awaitable[Any]] = context.read
        self._incoming = incoming
        self._is_first = True

    def __aiter__(self) -> _Messages:
        return self

    async def __anext__(self) -> Any:
        received = await self._read()
        if received is aio.EOF:
            raise StopAsyncIteration
        if self._is_first:
            self._incoming.request, self._is_first = received.data, False
        return received.well_formed()


def _unary(inner: Callable[[Any, Any], Awaitable[Any]], method: str) -> Any:
    async def call(_: object, context: aio.ServicerContext[Any, Any]) -> Any:
        incoming = Incoming.of(method, context)
        INCOMING.set(incoming)
        async with _translated(context, method):
            return await inner(_Messages(context, incoming), context)

    return call


def _stream(inner: Callable[[Any, Any], AsyncGenerator[Any]], method: str) -> Any:
    async def call(_: object, context: aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
        incoming = Incoming.of(method, context)
        INCOMING.set(incoming)
        async with (
            _translated(context, method),
            contextlib.aclosing(inner(_Messages(context, incoming), context)) as responses,
        ):
            async for response in responses:
                yield response

    return call


@contextlib.asynccontextmanager
async def _translated(context: aio.ServicerContext[Any, Any], method: str) -> AsyncGenerator[None]:
    try:
        yield
    except RefusedError as exc:
        await _abort(context, exc)
    except (BlobFullError, StoreFullError):
        await _abort(context, RefusedError(Code.STORAGE_FULL))
    except LeadershipLostError:
        await _abort(context, RefusedError(Code.NO_LEADER))
    except StoreUnavailableError:
        await _abort(context, RefusedError(Code.STORE_UNAVAILABLE))
    except aio.AbortError:
        raise
    except Exception:  # the RPC boundary: logged with its traceback, told to nobody
        number = secrets.token_hex(4)
        logs.get().exception("a call failed", method=method, number=number)
        await _abort(context, RefusedError(Code.INTERNAL, number))


async def _abort(context: aio.ServicerContext[Any, Any], refused: RefusedError) -> None:
    trailers = [(identity.METADATA_CODE, refused.code.value)]
    if refused.retry is not None:
        trailers.append((wire.METADATA_RETRY, f"{refused.retry.min_s:g} {refused.retry.max_s:g}"))
    await context.abort(refused.status, _shortened(str(refused)), tuple(trailers))


def _shortened(text: str) -> str:
    quoted = quote(text, safe=_PLAIN)
    if len(quoted) <= MAX_QUOTED:
        return text
    return unquote(re.sub("%.?$", "", quoted[:MAX_QUOTED]), errors="ignore") + " ..."
