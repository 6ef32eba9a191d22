"""Models as the messages of a download: read once for all clients that download them at about the same time.

The clients of a cohort receive a version at the same moment and download it in parallel. So the chunks that were read
last are cached, as the messages that gRPC sends: a fixed number of them, however large the models are.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncGenerator
from pathlib import Path

from fedplat import wire
from fedplat.wire import pieces
from fedplat_server.errors import BlobError
from fedplat_server.storage import files
from fedplat_server.storage.shared_reads import CoalescingCache

NUM_KEPT = 16


class Chunks:
    """A cache of the chunks that were read last; for one event loop."""

    def __init__(self, chunk_bytes: int = wire.CHUNK_BYTES, num_kept: int = NUM_KEPT) -> None:
        self._chunk_bytes = chunk_bytes
        self._reads: CoalescingCache[tuple[Path, int]] = CoalescingCache(num_kept)

    async def messages(self, path: Path, offset: int, size_bytes: int) -> AsyncGenerator[bytes]:
        """Yield a file from an offset to its end as messages `Chunk`. Raises `BlobError` if it cannot be read.

        All chunks but the first begin at multiples of the chunk size, so that resumed downloads share them too.
        """
        while offset < size_bytes:
            start = offset - offset % self._chunk_bytes
            end = min(start + self._chunk_bytes, size_bytes)
            if offset == start:
                yield await self._reads.get((path, start), functools.partial(_read, path, start, end))
            else:
                yield await asyncio.to_thread(_read, path, offset, end)
            offset = end


def _read(path: Path, start: int, end: int) -> bytes:
    with files.translate_os_errors("reading a model"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)
    if len(data) != end - start:
        raise BlobError(f"the model {path.name} has become shorter")
    return pieces.frame_field(pieces.CHUNK, data)
