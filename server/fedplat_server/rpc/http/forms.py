"""The forms of methods over HTTP: how a request becomes messages, and how messages become a response.

What distinguishes a form is one object; the application never asks for it. See `fedplat.wire.http` for the bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec
from google.protobuf.descriptor import MethodDescriptor
from typing_extensions import override

from fedplat import wire
from fedplat.wire import http, messages
from fedplat.wire.v1 import model_pb2
from fedplat_server.errors import Code, RefusedError
from fedplat_server.rpc.http import context
from fedplat_server.rpc.http.context import HttpCall, IncomingMessages, RequestBody, Scope
from fedplat_server.rpc.http.response import Headers, RequestProblem, Response
from fedplat_server.rpc.interceptor import Handler

PART_BYTES = wire.CHUNK_BYTES
"""The bytes of an upload that are received before they are stored, which costs a change of threads each time."""
PART_S = 1.0
"""The longest time for which the bytes of an upload are gathered: a slow caller must be seen to send."""
SENT_BYTES = 2**18
"""The octets of a file that are sent at a time. A peer that does not read them within the limit is cut off."""


class Outgoing(Protocol):
    """Sends the messages of a handler, or its refusal, in a form."""

    async def send(self, handler: Handler, call: HttpCall, response: Response) -> None:
        """Call the handler, and send what it returns. Raises `grpc.aio.AbortError` and `TimeoutError`."""
        ...

    async def refuse(self, call: HttpCall, response: Response, name: str, text: str) -> None:
        """Send a refusal with the name of a status of gRPC; the response may have begun."""
        ...


@dataclasses.dataclass(frozen=True)
class Form:
    """A form of methods: the content type of requests, their messages, and the responses.

    `read` returns the messages of a request from its head, its body and the maximum bytes of a message. Raises
    `context.BadHeaderError`.
    """

    content_type: str
    read: Callable[[Scope, RequestBody, int], IncomingMessages]
    outgoing: Outgoing


class _WholeBody(IncomingMessages):
    """The message that the body is."""

    def __init__(self, body: RequestBody, limit_bytes: int) -> None:
        self._body = body
        self._limit = limit_bytes
        self._is_read = False

    @override
    async def next(self) -> bytes | None:
        if self._is_read:
            return None
        self._is_read = True
        data = bytearray()
        while self._body.more and len(data) <= self._limit:
            for part in await self._body.receive():
                data += part
        if len(data) > self._limit:
            raise _too_large(self._limit)
        return bytes(data)


class _OneEnvelope(IncomingMessages):
    """The message in the envelope that the body is. All of it is read, so that the end of the caller is noticed."""

    def __init__(self, body: RequestBody, limit_bytes: int) -> None:
        self._whole = _WholeBody(body, limit_bytes + http.HEAD_BYTES)
        self._limit = limit_bytes

    @override
    async def next(self) -> bytes | None:
        data = await self._whole.next()
        if data is None:
            return None
        if len(data) < http.HEAD_BYTES or len(data) - http.HEAD_BYTES != _check_head(data, self._limit):
            raise RefusedError(Code.INVALID_REQUEST, "the body is not one envelope with a message")
        return data[http.HEAD_BYTES :]


class _Envelopes(IncomingMessages):
    """The messages in the envelopes of the body, each read when it is asked for."""

    def __init__(self, body: RequestBody, limit_bytes: int) -> None:
        self._body = body
        self._limit = limit_bytes
        self._data = bytearray()

    @override
    async def next(self) -> bytes | None:
        if not await self._fill(http.HEAD_BYTES):
            return None
        end = http.HEAD_BYTES + _check_head(self._data, self._limit)
        await self._fill(end)
        message = bytes(self._data[http.HEAD_BYTES : end])
        del self._data[:end]
        return message

    async def _fill(self, size: int) -> bool:
        """Receive that many bytes; return False if the body has ended before. Raises `RefusedError` within them."""
        while len(self._data) < size:
            if not self._body.more:
                if not self._data:
                    return False
                raise RefusedError(Code.INVALID_REQUEST, "the body ends within an envelope")
            for part in await self._body.receive():
                self._data += part
        return True


def _check_head(data: bytes | bytearray, limit_bytes: int) -> int:
    """Return the size of the message in the envelope that begins here. Raises `RefusedError`."""
    flags, size = http.read_head(bytes(data[: http.HEAD_BYTES]))
    if flags:
        raise RefusedError(Code.INVALID_REQUEST, f"an envelope has the flags {flags}; expected 0: no compression")
    if size > limit_bytes:
        raise _too_large(limit_bytes)
    return size


def _too_large(limit_bytes: int) -> RefusedError:
    text = f"the message has more than the {limit_bytes} bytes that are expected for this method"
    return RefusedError(Code.TOO_LARGE, text)


class _FileUpload(IncomingMessages):
    """The first message of an upload, which is in a header, and then the octets of the body as messages."""

    def __init__(self, body: RequestBody, first: bytes) -> None:
        self._body = body
        self._first: bytes | None = first
        self._parts = deque[messages.Bytes]()
        self._size = 0

    @override
    async def next(self) -> bytes | None:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        body, clock = self._body, asyncio.get_running_loop().time
        began = clock()
        # If nothing has come in time, it waits: an empty message would be the end.
        while body.more and self._size < PART_BYTES and (not self._size or clock() - began < PART_S):
            received = await body.receive()
            self._parts += received
            self._size += sum(map(len, received))
        return messages.frame_field(messages.UPLOAD, *self._take()) if self._size else None

    def _take(self) -> list[messages.Bytes]:
        """Return the octets of the next message."""
        taken, room = list[messages.Bytes](), PART_BYTES
        while self._parts and room:
            part = self._parts.popleft()
            if len(part) > room:
                self._parts.appendleft(memoryview(part)[room:])
                part = memoryview(part)[:room]
            taken.append(part)
            room -= len(part)
        self._size -= PART_BYTES - room
        return taken


async def _iterate(handler: Handler, call: HttpCall) -> AsyncGenerator[bytes]:
    """Call a handler of any arity, and yield its messages. A gateway forwards all methods as streams."""
    serialize: Callable[[Any], bytes] = handler.response_serializer or bytes
    if not handler.response_streaming:
        yield serialize(await handler.stream_unary(None, call))
        return
    async with contextlib.aclosing(handler.stream_stream(None, call)) as found:
        async for message in found:
            yield serialize(message)


class _Message(Outgoing):
    """The only message is the body, and a refusal has a status of HTTP.

    A refusal of a response that has begun closes the connection: the caller must see that it is incomplete.
    """

    @override
    async def send(self, handler: Handler, call: HttpCall, response: Response) -> None:
        async with contextlib.aclosing(_iterate(handler, call)) as found:
            body = b"".join([each async for each in found])
        await response.send(200, body, [(b"content-type", http.PROTO.encode()), *_trailers(call)])

    @override
    async def refuse(self, call: HttpCall, response: Response, name: str, text: str) -> None:
        if response.has_begun:
            response.cut()
            await asyncio.Event().wait()  # the end of the connection cancels this task
        status = http.STATUSES[name]
        await response.refuse(RequestProblem(status.http, text, status.code), _trailers(call))


class _FileDownload(_Message):
    """The octets of a file."""

    @override
    async def send(self, handler: Handler, call: HttpCall, response: Response) -> None:
        head: Headers = [(b"content-type", http.OCTETS.encode())]
        async with contextlib.aclosing(_iterate(handler, call)) as found:
            async for message in found:
                if not response.has_begun:
                    await response.begin(200, head)
                data = messages.unframe_field(messages.CHUNK, message)
                data = memoryview(model_pb2.Chunk.FromString(message).data) if data is None else data
                for start in range(0, len(data), SENT_BYTES):
                    await response.write(data[start : start + SENT_BYTES], more=True)
        if not response.has_begun:
            await response.begin(200, head)
        await response.write(b"", more=False)


class _EnvelopeStream(Outgoing):
    """The messages in envelopes. The last one has a refusal, if there is one: the status of HTTP is always 200."""

    @override
    async def send(self, handler: Handler, call: HttpCall, response: Response) -> None:
        async with contextlib.aclosing(_iterate(handler, call)) as found:
            async for message in found:
                await self._begin(response)
                await response.write(http.enclose(message), more=True)
        await self._end(call, response, None)

    @override
    async def refuse(self, call: HttpCall, response: Response, name: str, text: str) -> None:
        await self._end(call, response, http.RefusalBody(http.STATUSES[name].code, text))

    async def _begin(self, response: Response) -> None:
        if not response.has_begun:
            await response.begin(200, [(b"content-type", http.STREAM.encode())])

    async def _end(self, call: HttpCall, response: Response, error: http.RefusalBody | None) -> None:
        await self._begin(response)
        metadata = {key: [value] for key, value in call.list_trailers()}
        last = msgspec.json.encode(http.LastEnvelope(error, metadata))
        await response.write(http.enclose(last, http.LAST), more=False)


def _trailers(call: HttpCall) -> Headers:
    return [(f"{http.TRAILER_PREFIX}{key}".encode(), value.encode()) for key, value in call.list_trailers()]


UNARY = Form(http.PROTO, lambda scope, body, limit: _WholeBody(body, limit), _Message())
UPLOAD = Form(http.OCTETS, lambda scope, body, limit: _FileUpload(body, context.read_first(scope)), _Message())
DOWNLOAD = Form(http.PROTO, UNARY.read, _FileDownload())
WATCH = Form(http.STREAM, lambda scope, body, limit: _OneEnvelope(body, limit), _EnvelopeStream())
"""A method with a stream of responses."""
SUBMISSION = Form(http.STREAM, lambda scope, body, limit: _Envelopes(body, limit), _EnvelopeStream())
"""A method with a stream of requests."""
_OCTET_FORMS = {http.UPLOAD_METHOD: UPLOAD, http.DOWNLOAD_METHOD: DOWNLOAD}


def list_forms(methods: Iterable[MethodDescriptor]) -> Mapping[str, Form]:
    """Return the forms of methods by their paths (`/service/name`)."""
    found: dict[str, Form] = {}
    for method in methods:
        path = f"/{method.containing_service.full_name}/{method.name}"
        messages_form = SUBMISSION if method.client_streaming else WATCH if method.server_streaming else UNARY
        found[path] = _OCTET_FORMS.get(path, messages_form)
    return found
