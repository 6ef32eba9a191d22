"""Files that are hashed while they are written."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from fedplat import durable
from fedplat_server.storage import files

_MIN_THREAD_BYTES = 1 << 16
"""The smallest chunk for which hashing in a thread during the write is faster than hashing afterwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blob:
    """A stored file, by its SHA-256."""

    digest: str
    size_bytes: int


class BlobWriter:
    """A file that is hashed while it is written: this takes 0.7 of the time if a second core is free."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self._size_bytes = 0
        self._writeback = files.Writeback()
        self._hasher = ThreadPoolExecutor(1, "hash a blob")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()

    def write(self, chunk: durable.Bytes) -> None:
        """Append bytes. The caller may change them afterwards."""
        size_bytes = memoryview(chunk).nbytes
        if size_bytes < _MIN_THREAD_BYTES:
            durable.write_all(self._descriptor, chunk)
            self._digest.update(chunk)
        else:
            hashing = self._hasher.submit(self._digest.update, chunk)
            try:
                durable.write_all(self._descriptor, chunk)
            finally:
                hashing.result()
        self._size_bytes += size_bytes
        self._writeback.on_written(self._descriptor, self._size_bytes)

    @property
    def blob(self) -> Blob:
        """The digest and size of the bytes written so far."""
        return Blob(self._digest.hexdigest(), self._size_bytes)


@contextlib.contextmanager
def create_hashed(path: Path) -> Generator[BlobWriter]:
    """Write a new file within the block. It is not synced."""
    descriptor = durable.create(path)
    try:
        with BlobWriter(descriptor) as writer:
            yield writer
    finally:
        os.close(descriptor)
