"""Models that are small enough to travel with an assignment: read once, however many clients are assigned at a time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from fedplat import wire
from fedplat.rounds import ModelVersion
from fedplat_server import logs
from fedplat_server.blobs import BlobStore

MAX_KEPT = 64
"""How many models are kept in memory: at most 4 MiB. Each open attempt needs one."""


class InlineModels:
    """The latest small models that were asked for."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._files: OrderedDict[str, asyncio.Task[bytes]] = OrderedDict()

    async def content(self, model: ModelVersion) -> bytes:
        """The file of a model; empty if it is too large to be sent along, or cannot be read."""
        if model.size_bytes > wire.INLINE_MODEL_BYTES:
            return b""
        reading = self._files.get(model.digest)
        if reading is None:
            reading = asyncio.create_task(self._read(model.digest), name=f"read {model.digest[:12]}")
            self._files[model.digest] = reading
            if len(self._files) > MAX_KEPT:
                self._files.popitem(last=False)
        return await asyncio.shield(reading)

    async def _read(self, digest: str) -> bytes:
        try:
            return await asyncio.to_thread(self._blobs.path(digest).read_bytes)
        except OSError as exc:  # whoever downloads it hears what is wrong
            logs.get().error("a model could not be read", digest=digest, error=str(exc))
            self._files.pop(digest, None)
            return b""
