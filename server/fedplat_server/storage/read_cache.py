"""Reads of models that many clients request at about the same time: each is done once.

The clients of a cohort receive a version at the same moment. A small model is sent with each assignment; a larger one
is downloaded in parallel. So the chunks that were read last are cached, as the messages that gRPC sends: a fixed number
of them, however large the models are.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable
from pathlib import Path
from typing import Generic, TypeVar

from fedplat import rounds, wire
from fedplat.wire import messages
from fedplat_server import errors, logs
from fedplat_server.storage import files
from fedplat_server.storage.blobs import BlobStore

NUM_CHUNKS = 8
"""The number of chunks that are kept in memory: at most 16 MiB."""
FAST_CHUNK_S = 0.5
"""If a chunk was sent within this time, the next one has twice the size."""
NUM_INLINE_MODELS = 64
"""The number of small models that are kept in memory: at most 4 MiB. Each open attempt needs one."""
Key = TypeVar("Key", bound=Hashable)


class CoalescingCache(Generic[Key]):
    """A cache of the `num_kept` contents that were requested last; for one event loop."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._kept: OrderedDict[Key, asyncio.Task[bytes]] = OrderedDict()

    async def get(self, key: Key, read: Callable[[], bytes]) -> bytes:
        """Return the cached content of a key, or that of `read`, which runs in a thread. Its errors are not cached."""
        task = self._kept.get(key)
        if task is None:
            task = self._kept[key] = asyncio.create_task(asyncio.to_thread(read), name=f"read {key}")
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._kept) > self._num_kept:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return await asyncio.shield(task)  # others may wait for it too

    def _forget_failed(self, key: Key, done: asyncio.Task[bytes]) -> None:
        if (done.cancelled() or done.exception() is not None) and self._kept.get(key) is done:
            del self._kept[key]


class Chunks:
    """A cache of the chunks that were read last; for one event loop.

    A chunk has `chunk_bytes`, or twice as many where the line is fast: those are cheaper for both ends.
    """

    def __init__(self, chunk_bytes: int = wire.CHUNK_BYTES, num_kept: int = NUM_CHUNKS) -> None:
        self._chunk_bytes = chunk_bytes
        self._reads: CoalescingCache[tuple[Path, int, int]] = CoalescingCache(num_kept)

    async def messages(
        self, path: Path, offset: int, size_bytes: int, chunk_bytes: int | None = None
    ) -> AsyncGenerator[bytes]:
        """Yield a file from an offset to its end as messages `Chunk`. Raises `BlobError` if it cannot be read.

        All chunks but the first begin at multiples of the chunk size, large ones at odd multiples, so that resumed
        downloads share them too. The first chunk of a call is not a large one: on a slow line, it must arrive before
        the line breaks. `chunk_bytes` replaces the chunk size for this call.
        """
        clock, small = asyncio.get_running_loop().time, chunk_bytes or self._chunk_bytes
        length = small
        while offset < size_bytes:
            end = min(offset + length - (offset + small) % length, size_bytes)
            read = functools.partial(_read, path, offset, end)
            is_shared = offset % small == 0
            message = await (self._reads.get((path, offset, end), read) if is_shared else asyncio.to_thread(read))
            began = clock()
            yield message
            length = 2 * small if clock() - began < FAST_CHUNK_S else small
            offset = end


def _read(path: Path, start: int, end: int) -> bytes:
    with files.translate_os_errors("reading a model"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)
    if len(data) != end - start:
        raise errors.BlobError(f"the model {path.name} has become shorter")
    return messages.frame_field(messages.CHUNK, data)


class InlineModels:
    """A cache of the small models that were requested last."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._reads: CoalescingCache[str] = CoalescingCache(NUM_INLINE_MODELS)

    async def content(self, model: rounds.ModelVersion) -> bytes:
        """Return the file of a model; empty if it is too large to be sent inline, or cannot be read."""
        if model.size_bytes > wire.INLINE_MODEL_BYTES:
            return b""
        try:
            return await self._reads.get(model.digest, functools.partial(self._read, model.digest))
        except (OSError, errors.BlobError):  # the client downloads the model instead, and receives the error there
            return b""

    def _read(self, digest: str) -> bytes:
        try:
            return self._blobs.fetch(digest).read_bytes()
        except (OSError, errors.BlobError) as exc:
            logs.get().error("a model could not be read", digest=digest, error=str(exc))
            raise
