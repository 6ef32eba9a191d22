"""A channel of gRPC's asynchronous API that speaks HTTP/1.1: the stubs of tests work over it unchanged.

It is written from `docs/protocol.md`, not with the product's client: what the two do must agree.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NamedTuple

import grpc
from grpc import aio

from fedplat.wire.v1 import fleet_pb2, model_pb2

CODES = {
    "canceled": "CANCELLED",
    "unknown": "UNKNOWN",
    "invalid_argument": "INVALID_ARGUMENT",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
    "not_found": "NOT_FOUND",
    "already_exists": "ALREADY_EXISTS",
    "permission_denied": "PERMISSION_DENIED",
    "resource_exhausted": "RESOURCE_EXHAUSTED",
    "failed_precondition": "FAILED_PRECONDITION",
    "aborted": "ABORTED",
    "out_of_range": "OUT_OF_RANGE",
    "unimplemented": "UNIMPLEMENTED",
    "internal": "INTERNAL",
    "unavailable": "UNAVAILABLE",
    "data_loss": "DATA_LOSS",
    "unauthenticated": "UNAUTHENTICATED",
}


class Answer(NamedTuple):
    """A response of HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes


class HttpPeer:
    """Makes requests, each on a connection of its own."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.port = port
        self.tls = tls

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.tls, server_hostname="localhost" if self.tls else None
        )

    async def send(self, data: bytes) -> Answer:
        """Sends bytes, whatever they are; returns the first response."""
        reader, writer = await self.open()
        try:
            writer.write(data)
            with contextlib.suppress(ConnectionError):  # it may have answered before it had all
                await writer.drain()
            return await read_answer(reader)
        finally:
            writer.close()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], method: str = "POST") -> Answer:
        return await self.send(request(path, body, headers, method))


def request(path: str, body: bytes, headers: Mapping[str, str], method: str = "POST") -> bytes:
    """The bytes of a request."""
    lines = {"host": "localhost", "content-length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    return await _read_rest(reader, *await read_head(reader))


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status and the headers of a response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    return int(head[0].split()[1]), headers


async def _read_rest(reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> Answer:
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        body = b"".join([chunk async for chunk in read_chunks(reader)])
    else:
        body = b"" if status == 204 else await reader.read()
    return Answer(status, headers, body)


async def read_chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    while size := int(await reader.readuntil(b"\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


def envelope(message: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(message).to_bytes(4, "big") + message


def headers_of(metadata: Iterable[tuple[str, str | bytes]], content_type: str) -> dict[str, str]:
    """The headers of a call."""
    found = {"content-type": content_type, "connect-protocol-version": "1"}
    for name, value in metadata:
        found[name] = base64.b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value
    return found


def error_of(answer: Answer) -> aio.AioRpcError:
    """The error that gRPC would raise for a refusal."""
    prefix = "trailer-"
    if "json" not in answer.headers.get("content-type", ""):  # of the framework, for a request that is not valid
        code = grpc.StatusCode.INVALID_ARGUMENT if answer.status < 500 else grpc.StatusCode.INTERNAL
        return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), answer.body.decode("latin-1"))
    said = json.loads(answer.body)
    trailing = [(name.removeprefix(prefix), value) for name, value in answer.headers.items() if name.startswith(prefix)]
    code = grpc.StatusCode[CODES[said["code"]]]
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), said.get("message", ""))


OCTETS = frozenset({"/fedplat.wire.v1.Fleet/Download", "/fedplat.wire.v1.Fleet/Upload"})
"""The streams that are files, and no envelopes."""
STREAM = "application/connect+proto"


def _same(message: Any) -> Any:
    return message


class _Responses:
    """A stream of responses, which may be cancelled."""

    def __init__(self, found: AsyncGenerator[Any]) -> None:
        self._found = found
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._found

    async def aclose(self) -> None:
        await self._found.aclose()

    def cancel(self) -> None:
        self._closing = asyncio.create_task(self.aclose())


class HttpStubChannel:
    """The channel: a task for each call, which may be awaited or cancelled."""

    def __init__(self, peer: HttpPeer) -> None:
        self.peer = peer

    async def __aenter__(self) -> HttpStubChannel:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Does nothing: each call has a connection of its own."""

    async def _ask(self, path: str, body: bytes, headers: Mapping[str, str], timeout: float | None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                answer = await self.peer.post(path, body, headers)
        except TimeoutError:
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "there was no answer in time") from None
        except (OSError, EOFError) as exc:
            raise _failure(grpc.StatusCode.UNAVAILABLE, f"the connection broke: {exc}") from exc
        if answer.status != 200:
            raise error_of(answer)
        return answer.body

    async def _ask_stream(
        self, path: str, requests: list[bytes], metadata: Any, timeout: float | None
    ) -> AsyncIterator[bytes]:
        """The messages of a response in envelopes, as they come."""
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await self.peer.open()
                with contextlib.closing(writer):
                    writer.write(request(path, b"".join(map(envelope, requests)), headers_of(metadata, STREAM)))
                    status, headers = await read_head(reader)
                    if status != 200:
                        raise error_of(await _read_rest(reader, status, headers))
                    async with contextlib.aclosing(read_chunks(reader)) as chunks:
                        async for message in _read_envelopes(chunks):
                            yield message
        except TimeoutError:
            raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "there was no answer in time") from None
        except (OSError, EOFError) as exc:
            raise _failure(grpc.StatusCode.UNAVAILABLE, f"the connection broke: {exc}") from exc

    def unary_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., Any]:
        serialize, decode = request_serializer or _same, response_deserializer or _same

        async def ask(request: Any, timeout: float | None, metadata: Any) -> Any:
            headers = headers_of(metadata, "application/proto")
            return decode(await self._ask(path, serialize(request), headers, timeout))

        def call(request: Any, timeout: float | None = None, metadata: Any = ()) -> asyncio.Task[Any]:
            return asyncio.create_task(ask(request, timeout, metadata))

        return call

    def unary_stream(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., Any]:
        serialize, decode = request_serializer or _same, response_deserializer or _same

        async def receive(request: Any, timeout: float | None, metadata: Any) -> AsyncGenerator[Any]:
            if path not in OCTETS:
                async for message in self._ask_stream(path, [serialize(request)], metadata, timeout):
                    yield decode(message)
                return
            body = await self._ask(path, serialize(request), headers_of(metadata, "application/proto"), timeout)
            if body:
                yield model_pb2.Chunk(data=body)

        def call(request: Any, timeout: float | None = None, metadata: Any = ()) -> _Responses:
            return _Responses(receive(request, timeout, metadata))

        return call

    def stream_unary(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Callable[..., Any]:
        serialize, decode = request_serializer or _same, response_deserializer or _same

        async def send(requests: Any, timeout: float | None, metadata: Any) -> Any:
            given = [each async for each in requests] if isinstance(requests, AsyncIterator) else list(requests)
            if path not in OCTETS:
                sent = [serialize(each) for each in given]
                (message,) = [each async for each in self._ask_stream(path, sent, metadata, timeout)]
                return decode(message)
            first = serialize(given[0]) if given else b""
            headers = headers_of([*metadata, ("fedplat-request-bin", first)], "application/octet-stream")
            body = b"".join(each.data if isinstance(each, fleet_pb2.UploadRequest) else each for each in given[1:])
            return decode(await self._ask(path, body, headers, timeout))

        def call(requests: Any, timeout: float | None = None, metadata: Any = ()) -> asyncio.Task[Any]:
            return asyncio.create_task(send(requests, timeout, metadata))

        return call

    stream_stream = unary_stream


async def _read_envelopes(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The messages of envelopes. Raises the error of the last one, and `EOFError` without it."""
    data = b""
    async for part in parts:
        data += part
        while len(data) >= 5 and len(data) >= (end := 5 + int.from_bytes(data[1:5], "big")):
            flags, message, data = data[0], data[5:end], data[end:]
            if not flags:
                yield message
                continue
            assert (flags, data) == (2, b"")
            said = json.loads(message)
            if "error" in said:
                trailing = [(name, values[0]) for name, values in said.get("metadata", {}).items()]
                code, text = grpc.StatusCode[CODES[said["error"]["code"]]], said["error"].get("message", "")
                raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), text)
            return
    raise EOFError("the response has no end")


def _failure(code: grpc.StatusCode, text: str) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), text)
