"""Models that are small enough to travel with an assignment: read once, however many clients are assigned at a time."""

from __future__ import annotations

import functools

from fedplat import wire
from fedplat.rounds import ModelVersion
from fedplat_server import logs
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.shared_reads import CoalescingCache

MAX_KEPT = 64
"""How many models are kept in memory: at most 4 MiB. Each open attempt needs one."""


class InlineModels:
    """The latest small models that were asked for."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._reads: CoalescingCache[str] = CoalescingCache(MAX_KEPT)

    async def content(self, model: ModelVersion) -> bytes:
        """The file of a model; empty if it is too large to be sent along, or cannot be read."""
        if model.size_bytes > wire.INLINE_MODEL_BYTES:
            return b""
        try:
            return await self._reads.get(model.digest, functools.partial(self._read, model.digest))
        except OSError:  # whoever downloads it hears what is wrong
            return b""

    def _read(self, digest: str) -> bytes:
        try:
            return self._blobs.path(digest).read_bytes()
        except OSError as exc:
            logs.get().error("a model could not be read", digest=digest, error=str(exc))
            raise
