"""Models that are small enough to be sent with an assignment, read once for all clients that are assigned together."""

from __future__ import annotations

import functools

from fedplat import wire
from fedplat.rounds import ModelVersion
from fedplat_server import logs
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.shared_reads import CoalescingCache

MAX_KEPT = 64
"""The number of models that are kept in memory: at most 4 MiB. Each open attempt needs one."""


class InlineModels:
    """A cache of the small models that were requested last."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs
        self._reads: CoalescingCache[str] = CoalescingCache(MAX_KEPT)

    async def content(self, model: ModelVersion) -> bytes:
        """Return the file of a model; empty if it is too large to be sent inline, or cannot be read."""
        if model.size_bytes > wire.INLINE_MODEL_BYTES:
            return b""
        try:
            return await self._reads.get(model.digest, functools.partial(self._read, model.digest))
        except OSError:  # the client downloads the model instead, and receives the error there
            return b""

    def _read(self, digest: str) -> bytes:
        try:
            return self._blobs.path(digest).read_bytes()
        except OSError as exc:
            logs.get().error("a model could not be read", digest=digest, error=str(exc))
            raise
