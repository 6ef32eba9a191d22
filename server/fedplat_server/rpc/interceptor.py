"""Every call: the limits of its messages, exceptions as gRPC statuses, and handlers of any arity.

gRPC receives the request of a unary method in full before it calls the handler. The handler of a streaming method reads
requests itself, so a call can be checked before its first message is in memory. On the wire both are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from urllib.parse import quote, unquote

import grpc
from google.protobuf.message import DecodeError
from grpc import aio
from prometheus_client import Histogram
from typing_extensions import override

from fedplat import wire
from fedplat.secure_aggregation import messages
from fedplat.wire import auth
from fedplat_server import errors, logs
from fedplat_server.instruments import Instruments, method_label
from fedplat_server.rpc.context import CallContext, ServedCall

if TYPE_CHECKING:
    from fedplat_server.tracing.provider import Tracing


Context: TypeAlias = CallContext
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


def wrap_handler(
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


MAX_QUOTED = 6000
"""Maximum bytes of a status message, quoted as in the trailers, which may have 8 KiB in all."""
_TRACED = "/fedplat."
"""The beginning of the methods whose calls have spans; those of the health service would be most of them."""
_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

# A string: these classes are generic for the type checker only.
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


class ErrorInterceptor(aio.ServerInterceptor):
    """Translates exceptions of handlers to statuses, and measures the duration of calls.

    Details of unexpected exceptions are only logged, under a number. With `tracing`, each call has a span.
    """

    def __init__(self, instruments: Instruments, tracing: Tracing | None = None) -> None:
        # Cached: otherwise each open call would hold its own handler.
        wrap = functools.partial(_wrap, duration=instruments.call_duration, tracing=tracing)
        self._wrap: Callable[[Handler, str], Handler] = functools.lru_cache(maxsize=64)(wrap)

    @override
    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler: Any = await continuation(handler_call_details)
        return self.wrap(handler, handler_call_details.method) if handler is not None else None

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Return a handler that accepts a stream of messages, for calls of its method that do not come from gRPC."""
        return self._wrap(handler, method)


def _wrap(handler: Handler, method: str, *, duration: Histogram, tracing: Tracing | None) -> Handler:
    assert handler.request_streaming, f"{method} would receive a message before the call is admitted"
    tracing = tracing if method.startswith(_TRACED) else None
    observe = functools.partial(_observe, functools.partial(_measure, duration, method_label(method)), tracing)
    return wrap_handler(
        handler,
        _decoder(handler.request_deserializer, max_bytes(method)),
        functools.partial(_wrap_returning, method=method, observe=observe),
        functools.partial(_wrap_yielding, method=method, observe=observe),
    )


SMALL_BYTES = 128 * 2**10
"""Maximum bytes of a message of a method that is not in the table below."""
_TINY_BYTES = 2**10
"""The messages of callers without a credential, but for the labels of an enrollment."""
_MAX_BYTES = {
    "GetChallenge": _TINY_BYTES,
    "OpenSession": _TINY_BYTES,
    "Enroll": 64 * 2**10,
    "Check": _TINY_BYTES,
    "Watch": _TINY_BYTES,
    "List": _TINY_BYTES,
    "ServerReflectionInfo": _TINY_BYTES,
    "Report": wire.INLINE_BYTES + SMALL_BYTES,
    "Step": messages.max_bytes(messages.MAX_GROUP) + SMALL_BYTES,
    "Upload": wire.MAX_REQUEST_BYTES,
    "UploadModel": wire.MAX_REQUEST_BYTES,
    "CreateJob": wire.MAX_REQUEST_BYTES,
}


def max_bytes(method: str) -> int:
    """Return the maximum bytes of a message of a method (`/service/name`)."""
    return _MAX_BYTES.get(method.rpartition("/")[2], SMALL_BYTES)


@dataclasses.dataclass(slots=True)
class Incoming:
    """The call that this task serves. `request` has the bytes of its first message, which clients sign.

    `metadata` is read once, since gRPC copies it each time. `certified` (see `authentication.ClientCall`) is None until
    it has been read.
    """

    method: str
    metadata: Mapping[str, str | bytes]
    request: bytes = b""
    certified: str | None = None

    @classmethod
    def of(cls, method: str, context: ServedCall) -> Incoming:
        """Return a call before its first message."""
        return cls(method, {str(key): value for key, value in context.invocation_metadata() or ()})


INCOMING: ContextVar[Incoming] = ContextVar("incoming")


@dataclasses.dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message and its bytes, or its refusal. If decoding raised, gRPC would log a traceback each time."""

    message: Any
    data: bytes
    refused: errors.RefusedError | None = None

    def unwrap(self) -> Any:
        """Return the message. Raises `RefusedError` if it is refused."""
        if self.refused is not None:
            raise self.refused
        return self.message


def _decoder(decode: Callable[[bytes], Any] | None, limit_bytes: int) -> Callable[[bytes], ReceivedMessage]:
    def decode_or_mark(data: bytes) -> ReceivedMessage:
        if len(data) > limit_bytes:
            text = f"the message has {len(data)} bytes; expected at most {limit_bytes} for this method"
            return ReceivedMessage(None, b"", errors.RefusedError(errors.Code.TOO_LARGE, text))
        if decode is None:  # a gateway forwards bytes
            return ReceivedMessage(data, b"")
        try:
            return ReceivedMessage(decode(data), data)
        except DecodeError:
            text = "its bytes are not a message of this protocol"
            return ReceivedMessage(None, b"", errors.RefusedError(errors.Code.INVALID_REQUEST, text))

    return decode_or_mark


class _Messages:
    """The decoded messages of a call, each received on demand.

    Not a generator: asyncio would need a task to close each one that is not exhausted, as most are not.
    """

    def __init__(self, context: ServedCall, incoming: Incoming) -> None:
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
        return received.unwrap()


_Measure = Callable[[ServedCall], contextlib.AbstractContextManager[None]]
_Observe = Callable[["Incoming", ServedCall], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _measure(duration: Histogram, label: str, context: ServedCall) -> Generator[None]:
    """Record the duration and the status of the call that the block serves."""
    started, status = time.perf_counter(), "CANCELLED"
    try:
        yield
        status = grpc.StatusCode.OK.name
    except aio.AbortError:
        status = context.code().name
        raise
    finally:
        duration.labels(label, status).observe(time.perf_counter() - started)


@contextlib.contextmanager
def _observe(measure: _Measure, tracing: Tracing | None, incoming: Incoming, context: ServedCall) -> Generator[None]:
    """Measure the call that the block serves, and make its span."""
    with measure(context), _span(tracing, incoming, context):
        yield


def _wrap_returning(inner: Callable[[Any, Any], Awaitable[Any]], method: str, observe: _Observe) -> Behavior:
    async def call(_: object, context: ServedCall) -> Any:
        incoming = Incoming.of(method, context)
        INCOMING.set(incoming)
        with observe(incoming, context):
            async with _translate_errors(context, method):
                return await inner(_Messages(context, incoming), context)

    return call


def _wrap_yielding(inner: Callable[[Any, Any], AsyncGenerator[Any]], method: str, observe: _Observe) -> Behavior:
    async def call(_: object, context: ServedCall) -> AsyncGenerator[Any]:
        incoming = Incoming.of(method, context)
        INCOMING.set(incoming)
        with observe(incoming, context):
            async with (
                _translate_errors(context, method),
                contextlib.aclosing(inner(_Messages(context, incoming), context)) as responses,
            ):
                async for response in responses:
                    yield response

    return call


def _span(tracing: Tracing | None, incoming: Incoming, context: ServedCall) -> contextlib.AbstractContextManager[None]:
    """Return the span of a call; without tracing, a context that does nothing."""
    if tracing is None:
        return _NO_SPAN
    return tracing.call(incoming.method, incoming.metadata, functools.partial(_status_name, context))


def _status_name(context: ServedCall) -> str:
    code = cast(grpc.StatusCode | None, context.code())  # unset after a normal end, unlike the stub's type
    return code.name if code is not None else grpc.StatusCode.OK.name


_NO_SPAN = contextlib.nullcontext()


@contextlib.asynccontextmanager
async def _translate_errors(context: ServedCall, method: str) -> AsyncGenerator[None]:
    try:
        yield
    except errors.RefusedError as exc:
        await _abort(context, exc)
    except (errors.BlobFullError, errors.StoreFullError):
        await _abort(context, errors.RefusedError(errors.Code.STORAGE_FULL))
    except errors.LeadershipLostError:
        await _abort(context, errors.RefusedError(errors.Code.NO_LEADER))
    except errors.BudgetUnknownError as exc:
        await _abort(context, errors.RefusedError(errors.Code.OVER_BUDGET, str(exc)))
    except (errors.StoreUnavailableError, errors.BlobUnavailableError):
        await _abort(context, errors.RefusedError(errors.Code.STORE_UNAVAILABLE))
    except aio.AbortError:
        raise
    except Exception:  # the RPC boundary: log the traceback, and do not send it to the caller
        number = secrets.token_hex(4)
        logs.get().exception("a call failed", method=method, number=number)
        await _abort(context, errors.RefusedError(errors.Code.INTERNAL, number))


async def _abort(context: ServedCall, refused: errors.RefusedError) -> None:
    trailers = [(auth.METADATA_CODE, refused.code.name)]
    if refused.retry is not None:
        trailers.append((wire.METADATA_RETRY, f"{refused.retry.min_s:g} {refused.retry.max_s:g}"))
    await context.abort(grpc.StatusCode[refused.code.status], _shorten(str(refused)), tuple(trailers))


def _shorten(text: str) -> str:
    quoted = quote(text, safe=_PLAIN)
    if len(quoted) <= MAX_QUOTED:
        return text
    return unquote(re.sub("%.?$", "", quoted[:MAX_QUOTED]), errors="ignore") + " ..."
