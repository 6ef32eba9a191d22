"""Transfer of files over gRPC streams, one chunk at a time; file access runs in threads."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from fedplat import durable, model
from fedplat.errors import ModelError
from fedplat.wire import messages
from fedplat.wire.v1 import fleet_pb2
from fedplat_server import config, crash_points
from fedplat_server.aggregation.backend import run_to_the_end
from fedplat_server.auth import rate_limits
from fedplat_server.errors import BlobMissingError, Code, RefusedError, UploadError
from fedplat_server.messages import validation
from fedplat_server.storage import files
from fedplat_server.storage.blob_folder import INCOMING, TEMPORARY
from fedplat_server.storage.blobs import Blob, BlobStore
from fedplat_server.storage.read_cache import Chunks
from fedplat_server.storage.spool_file import OpenUpload


class Carrier(Protocol):
    """A message with a field of bytes."""

    @property
    def data(self) -> durable.Bytes:
        """The bytes of the message."""
        ...


Message = TypeVar("Message", bound=Carrier)


class UploadMessage(NamedTuple):
    """A message of an upload: its header or bytes. The bytes are a view of the received message, not a copy."""

    data: durable.Bytes
    header: fleet_pb2.UploadHeader | None = None

    @classmethod
    def of(cls, message: bytes) -> UploadMessage:
        """Decode a message. Raises `DecodeError` if it is invalid."""
        data = messages.unframe_field(messages.UPLOAD, message)
        if data is not None:
            return cls(data)
        request = fleet_pb2.UploadRequest.FromString(message)
        return cls(request.data, request.header if request.HasField("header") else None)


async def enforce_min_rate(messages: AsyncIterator[Message], limits: config.Limits) -> AsyncGenerator[Message]:
    """Yield the messages of a caller. Raises `RefusedError` if they arrive below the minimum rate."""
    clock = asyncio.get_running_loop().time
    progress = rate_limits.MinimumRate(limits.idle_s, limits.min_bytes_per_s * limits.idle_s, clock())
    while True:
        try:
            async with asyncio.timeout(progress.left_s(clock())):  # `wait_for` would create a task for each message
                message = await anext(messages, None)
        except TimeoutError as exc:
            text = f"fewer than {limits.min_bytes_per_s:g} bytes a second in {limits.idle_s:g} s"
            raise RefusedError(Code.TOO_SLOW, text) from exc
        if message is None:
            return
        progress.on_received(len(message.data), clock())
        yield message


async def send(chunks: Chunks, blobs: BlobStore, digest: str, offset: int) -> AsyncGenerator[bytes]:
    """Yield a model file from an offset on, as messages `Chunk`. Raises `RefusedError` if the offset is beyond it."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            (path,) = await stack.enter_async_context(blobs.local(digest))
            size_bytes = (await asyncio.to_thread(path.stat)).st_size
        except (FileNotFoundError, BlobMissingError) as exc:
            raise RefusedError(Code.NO_SUCH_MODEL) from exc
        if offset > size_bytes:
            raise RefusedError(Code.WRONG_OFFSET, f"the offset is {offset}, but the file has {size_bytes} bytes")
        messages = await stack.enter_async_context(contextlib.aclosing(chunks.messages(path, offset, size_bytes)))
        async for message in messages:
            yield message


async def receive(
    open_upload: Callable[[str, int, int], OpenUpload],
    header: fleet_pb2.UploadHeader,
    parts: AsyncIterator[durable.Bytes],
    is_busy: Callable[[], bool],
) -> int:
    """Append parts to an upload until they end; return the number of bytes stored so far.

    `open_upload` blocks; it gets the digest, the size and the offset. Raises `RefusedError` if the offset is wrong, or
    once the file is not wanted any more (`is_busy`).
    """
    digest = validation.digest(header.digest)
    try:
        upload = await asyncio.to_thread(open_upload, digest, header.size_bytes, header.offset)
        try:
            await _write(upload, parts, is_busy)
            if upload.received == header.size_bytes:
                await asyncio.to_thread(upload.finish)  # drops bytes that do not match the digest: restart at 0
        finally:
            await asyncio.to_thread(upload.close)
    except UploadError as exc:
        raise RefusedError(Code.WRONG_OFFSET if is_busy() else Code.STALE_ASSIGNMENT, str(exc)) from exc
    return upload.received


async def _write(upload: OpenUpload, parts: AsyncIterator[durable.Bytes], is_busy: Callable[[], bool]) -> None:
    """Hash and store each part in a thread while the next one is being received; at most two are in memory."""
    writing: asyncio.Future[None] | None = None
    loop = asyncio.get_running_loop()
    try:
        async for data in parts:
            if not is_busy():
                raise RefusedError(Code.STALE_ASSIGNMENT)
            if writing is not None:
                await writing
            writing = loop.run_in_executor(None, upload.write, data)
    finally:
        if writing is not None:
            await writing


async def store_model(blobs: BlobStore, parts: AsyncIterator[durable.Bytes], limit_bytes: int) -> Blob:
    """Write a model that arrives in parts to the blob store, in canonical form.

    Raises `RefusedError` if it is too large or invalid.
    """
    with (
        files.translate_os_errors("receiving a model"),
        tempfile.NamedTemporaryFile(dir=blobs.folder, prefix=INCOMING, suffix=TEMPORARY) as file,
    ):
        size = 0
        async for data in parts:
            size += len(data)
            if size > limit_bytes:
                raise RefusedError(Code.TOO_LARGE, f"a model may have at most {limit_bytes} bytes")
            with crash_points.step("model.receive"):
                # To its end, even if the caller leaves: otherwise the file would be closed meanwhile, and the thread
                # would write to whatever file has its descriptor next, such as the database.
                await run_to_the_end(durable.write_all, file.fileno(), data)
        try:
            return await asyncio.to_thread(_put_canonical, blobs, Path(file.name))
        except ModelError as exc:
            raise RefusedError(Code.INVALID_MODEL, str(exc).replace(str(Path(file.name)), "the file")) from exc


def _put_canonical(blobs: BlobStore, path: Path) -> Blob:
    parameters = model.Parameters.open(path)
    return blobs.put_chunks([parameters.schema.header, parameters.buffer.data])
