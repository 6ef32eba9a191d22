"""Files out of and into gRPC streams, off the event loop, a chunk at a time."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from io import FileIO
from pathlib import Path
from typing import TypeVar

from fedplat import wire
from fedplat.errors import ModelError
from fedplat.model import Parameters
from fedplat.wire.v1 import admin_pb2, fleet_pb2
from fedplat_server import crash, files, intake
from fedplat_server.blobs import Blob, BlobStore
from fedplat_server.config import Limits
from fedplat_server.errors import UploadError
from fedplat_server.rpc import quotas, requests
from fedplat_server.rpc.errors import Code, RefusedError
from fedplat_server.uploads import UploadKey, UploadStore

Message = TypeVar("Message", fleet_pb2.UploadRequest, admin_pb2.UploadModelRequest)


async def steadily(messages: AsyncIterator[Message], limits: Limits) -> AsyncGenerator[Message]:
    """The messages of a caller, who may not hold a stream open for (almost) nothing. Raises `RefusedError`."""
    clock = asyncio.get_running_loop().time
    progress = quotas.Progress(limits.idle_s, limits.min_bytes_per_s * limits.idle_s, clock())
    while True:
        try:
            message = await asyncio.wait_for(anext(messages, None), progress.left_s(clock()))
        except TimeoutError as exc:
            least = f"fewer than {limits.min_bytes_per_s:g} bytes a second in {limits.idle_s:g} s"
            raise RefusedError(Code.TOO_SLOW, least) from exc
        if message is None:
            return
        progress.made(len(message.data), clock())
        yield message


async def read(path: Path, offset: int) -> AsyncIterator[bytes]:
    """The bytes of a file from an offset on. Raises `RefusedError` for an offset beyond its end."""
    try:
        file, left = await asyncio.to_thread(_open_at, path, offset)
    except FileNotFoundError as exc:
        raise RefusedError(Code.NO_SUCH_MODEL) from exc
    try:
        if left < 0:
            raise RefusedError(Code.WRONG_OFFSET, f"offset {offset} of a file of {offset + left} bytes")
        while left and (data := await asyncio.to_thread(file.read, wire.CHUNK_BYTES)):
            left -= len(data)
            yield data
    finally:
        file.close()


def _open_at(path: Path, offset: int) -> tuple[FileIO, int]:
    """The file, and how many bytes it has from the offset on."""
    file = FileIO(path)
    left = file.seek(0, os.SEEK_END) - offset
    if left > 0:
        file.seek(offset)
    return file, left


async def receive(
    uploads: UploadStore,
    key: UploadKey,
    header: fleet_pb2.UploadHeader,
    parts: AsyncIterator[bytes],
    still_wanted: Callable[[], bool],
) -> int:
    """Appends parts to an upload until they end; returns how many bytes there are. Raises `RefusedError`."""
    digest = requests.digest(header.digest)
    try:
        upload = await asyncio.to_thread(uploads.open, key, digest, header.size_bytes, header.offset)
        try:
            async for data in parts:
                if not still_wanted():
                    raise RefusedError(Code.STALE_ASSIGNMENT)
                await asyncio.to_thread(upload.write, data)
            if upload.received == header.size_bytes:
                await asyncio.to_thread(upload.finish)  # bytes that are not those of the digest start again at 0
        finally:
            await asyncio.to_thread(upload.close)
    except UploadError as exc:
        raise RefusedError(Code.WRONG_OFFSET, str(exc)) from exc
    return upload.received


async def receive_inline(uploads: UploadStore, key: UploadKey, digest: str, update: bytes) -> bool:
    """Takes an update that came with its report; False when it has not the digest. Raises `RefusedError`."""
    try:
        return await asyncio.to_thread(_take_whole, uploads, key, digest, update)
    except UploadError as exc:  # the same report comes twice at a time, or a broken upload still writes
        raise RefusedError(Code.UPLOAD_INCOMPLETE, f"{exc}; report again") from exc


def _take_whole(uploads: UploadStore, key: UploadKey, digest: str, update: bytes) -> bool:
    if hashlib.sha256(update).hexdigest() != digest:
        return False
    if uploads.complete(key, digest) is None:
        received = uploads.received(key, digest)  # an earlier upload of these bytes may have broken off
        upload = uploads.open(key, digest, len(update), received)
        try:
            upload.write(update[received:])
        finally:
            upload.close()
    return True


async def store_model(blobs: BlobStore, parts: AsyncIterator[bytes], limit_bytes: int) -> Blob:
    """Writes a model that arrives in parts into the blob store, in canonical form. Raises `RefusedError`."""
    with (
        files.translated("receiving a model"),
        tempfile.NamedTemporaryFile(dir=blobs.folder, prefix="incoming-", suffix=".tmp") as file,
    ):
        size = 0
        async for data in parts:
            size += len(data)
            if size > limit_bytes:
                raise RefusedError(Code.TOO_LARGE, f"at most {limit_bytes}")
            with crash.step("model.receive"):
                await asyncio.to_thread(files.write_all, file.fileno(), data)
        try:
            return await asyncio.to_thread(_put_canonical, blobs, Path(file.name))
        except ModelError as exc:
            raise RefusedError(Code.INVALID_MODEL, intake.public_text(exc, Path(file.name))) from exc


def _put_canonical(blobs: BlobStore, path: Path) -> Blob:
    parameters = Parameters.open(path)
    return blobs.put_chunks([parameters.schema.header, parameters.buffer.data])
