"""Content-addressed files: `folder/aa/bb/<sha256>`, where aa and bb are the first digits of the digest.

A blob exists completely or not at all: it is written under a temporary name, synced and renamed, and its folder is
synced. Only the blobs that the database references are needed. At the start `remove_orphans` removes the others; later
a `Sweep` does, except for blobs that were written but not settled: `settle` ends this protection when the database
references a blob or never will. Everything here blocks: asyncio calls it in threads.

Before a file is removed its beginning is overwritten, since the numbers at the beginning of a rule's state may include
seeds of noise. Other copies of a file system (journals, snapshots, spare blocks) are out of reach.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from fedplat import durable
from fedplat_server import crash_points
from fedplat_server.errors import BlobError
from fedplat_server.instruments import Instruments
from fedplat_server.storage import files

_TEMPORARY = ".tmp"
ERASED_BYTES = 1 << 20
"""The number of bytes at the beginning of a file that are overwritten before it is removed."""
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


class BlobStore:
    """The blobs in a folder, which is created if it does not exist.

    Methods raise `BlobFullError` if the disk is full, and `BlobError` for other failures. A blob whose writing failed
    does not exist, and no part of it remains.
    """

    def __init__(self, folder: Path, instruments: Instruments | None = None) -> None:
        self.folder = folder
        duration = (instruments or Instruments()).blob_duration
        self._sync_duration = duration.labels("fsync", "folder")
        self._rename_duration = duration.labels("rename", "folder")
        self._delete_duration = duration.labels("delete", "folder")
        self.made: list[str] = []
        self._synced: set[Path] = set()
        self._unsettled = _UnsettledBlobs()
        with files.translate_os_errors(f"making the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def recorder(self) -> Self:
        """Return a view of this store that records the digests which it writes in its own list `made`."""
        view = copy.copy(self)
        view.made = []
        return view

    def settle(self, digests: Iterable[str]) -> None:
        """Let sweeps remove these blobs: the database references them or never will. Once for each write of a blob."""
        self._unsettled.settle(digests)

    @contextlib.contextmanager
    def protect(self, digest: str) -> Generator[None]:
        """Keep sweeps from removing a blob that the database is about to reference."""
        self._unsettled.add(digest)
        try:
            yield
        finally:
            self.settle([digest])

    @contextlib.contextmanager
    def sweep(self) -> Generator[Sweep]:
        """Start a sweep that ends with the block. There may be only one at a time."""
        with self._unsettled.watch() as skipped:
            yield Sweep(self, self._unsettled, skipped)

    @contextlib.contextmanager
    def writer(self) -> Generator[BlobWriter]:
        """Store a blob that is written within the block; the writer's `blob` is its digest and size afterwards."""
        temporary = self._temporary()
        with files.translate_os_errors("writing a blob"), _remove_on_error(temporary):
            descriptor = durable.create(temporary)
            try:
                with crash_points.step("blob.write"), BlobWriter(descriptor) as writer:
                    yield writer
                with self._sync_duration.time(), crash_points.step("blob.fsync"):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._move_in(temporary, writer.blob.digest)

    @contextlib.contextmanager
    def draft(self, path: Path) -> Generator[BlobWriter]:
        """Write a file that is not a blob yet, at a path of `temporary`."""
        with files.translate_os_errors("writing a draft of a blob"):
            descriptor = durable.create(path)
            try:
                with BlobWriter(descriptor) as writer:
                    yield writer
            finally:
                os.close(descriptor)

    def put_chunks(self, chunks: Iterable[durable.Bytes]) -> Blob:
        """Store the concatenated chunks."""
        with self.writer() as writer:
            for chunk in chunks:
                writer.write(chunk)
        return writer.blob

    def put_file(self, path: Path) -> Blob:
        """Store a copy of a file."""
        return self.put_chunks(_read_parts(path))

    def adopt(self, path: Path, digest: str) -> Blob:
        """Move a finished file of the same file system into the store; `digest` is its SHA-256."""
        self.path(digest)
        with files.translate_os_errors(f"adopting {path}"), self._sync_duration.time():
            durable.sync(path)
        return self._adopt_synced(path, digest)

    def adopt_file(self, path: Path) -> Blob:
        """Hash a finished file of the same file system while it is synced, and move it into the store."""
        with ThreadPoolExecutor(1) as threads, files.translate_os_errors(f"adopting {path}"):
            syncing = threads.submit(durable.sync, path)
            with path.open("rb", buffering=0) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            with self._sync_duration.time():
                syncing.result()
        return self._adopt_synced(path, digest)

    def _adopt_synced(self, path: Path, digest: str) -> Blob:
        with files.translate_os_errors(f"adopting {path}"):
            size_bytes = path.stat().st_size
            self._move_in(path, digest)
        return Blob(digest, size_bytes)

    @contextlib.contextmanager
    def temporary(self) -> Generator[Path]:
        """Yield a path for a file that is to be moved into the store; remove what the block leaves there.

        After a crash, `remove_orphans` removes the file.
        """
        path = self._temporary()
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                erase(path)

    def path(self, digest: str) -> Path:
        """Return the path of a blob, whether or not it exists. Raises `BlobError` if `digest` is not a digest.

        The check makes paths outside the store impossible.
        """
        if not files.is_digest(digest):
            raise BlobError(f"{digest[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
        return self.folder / digest[:2] / digest[2:4] / digest

    def exists(self, digest: str) -> bool:
        """Return whether a blob exists."""
        return self.path(digest).is_file()

    def size(self, digest: str) -> int:
        """Return the size of a blob in bytes. Raises `BlobError` if it does not exist."""
        with files.translate_os_errors(f"reading the blob {digest}"):
            return self.path(digest).stat().st_size

    def delete(self, digest: str) -> None:
        """Remove a blob, if it exists."""
        with files.translate_os_errors(f"removing the blob {digest}"), self._delete_duration.time():
            erase(self.path(digest))

    def all_digests(self) -> frozenset[str]:
        """Return the digests of all blobs."""
        with files.translate_os_errors("listing the blobs"):
            return frozenset(path.name for path in self.folder.glob("??/??/*") if files.is_digest(path.name))

    def remove_orphans(self, referenced: frozenset[str]) -> int:
        """Remove unreferenced blobs and return their number; also remove temporary files that a crash left.

        Only for the start: a blob that was just written is not referenced yet.
        """
        with files.translate_os_errors("removing temporary files"):
            for path in self.folder.glob(f"*{_TEMPORARY}"):
                erase(path)
        orphans = self.all_digests() - referenced
        for digest in orphans:
            with crash_points.step("blob.remove_orphan"):
                self.delete(digest)
        return len(orphans)

    def _temporary(self) -> Path:
        return self.folder / f"{uuid.uuid4().hex}{_TEMPORARY}"

    def _move_in(self, source: Path, digest: str) -> None:
        target = self.path(digest)
        folder = target.parent
        if folder not in self._synced:
            with crash_points.step("blob.new_folder"):
                folder.mkdir(parents=True, exist_ok=True)
                durable.sync(self.folder)
                durable.sync(folder.parent)
            self._synced.add(folder)
        # An existing blob with this digest is replaced: its entry in the folder might not be durable.
        self.made.append(digest)
        with self._rename_duration.time():
            with crash_points.step("blob.rename"), self._unsettled.lock:
                self._unsettled.add(digest)
                os.replace(source, target)
            with _remove_on_error(target), crash_points.step("blob.folder_sync"):
                durable.sync(folder)


class _UnsettledBlobs:
    """The blobs that sweeps must keep: how often each was written or protected without being settled. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._counts = Counter[str]()
        self._watched: set[str] | None = None

    def add(self, digest: str) -> None:
        """Count a blob that is being written, or is about to be referenced."""
        with self.lock:
            self._counts[digest] += 1
            if self._watched is not None:
                self._watched.add(digest)

    def settle(self, digests: Iterable[str]) -> None:
        """Count down blobs that the database references or never will."""
        with self.lock:
            for digest in digests:
                self._counts[digest] -= 1
                if self._counts[digest] <= 0:
                    del self._counts[digest]

    @contextlib.contextmanager
    def watch(self) -> Generator[set[str]]:
        """Yield the blobs that are unsettled now or are added within the block."""
        with self.lock:
            watched = self._watched = set(self._counts)
        try:
            yield watched
        finally:
            self._watched = None


class Sweep:
    """A removal of blobs that the database does not reference, as read after the sweep began."""

    def __init__(self, blobs: BlobStore, unsettled: _UnsettledBlobs, skipped: set[str]) -> None:
        self._blobs = blobs
        self._unsettled = unsettled
        self._skipped = skipped

    def remove(self, digests: Collection[str], *, older_than_s: float = 0.0) -> int:
        """Remove those of these blobs that exist, are settled and are old enough; return their total size in bytes."""
        size_bytes, until = 0, time.time() - older_than_s
        for digest in sorted(digests):
            path = self._blobs.path(digest)
            with files.translate_os_errors(f"removing {path}"), self._blobs.temporary() as aside, self._unsettled.lock:
                if digest in self._skipped or not path.is_file() or path.stat().st_mtime > until:
                    continue
                size_bytes += path.stat().st_size
                with crash_points.step("retention.remove"):
                    os.replace(path, aside)
        return size_bytes


def erase(path: Path) -> None:
    """Overwrite the beginning of a file and remove it, if it exists.

    A file with other hard links, such as those of a backup, is only unlinked here: its content is kept.
    """
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if status.st_nlink == 1:
                os.pwrite(descriptor, bytes(min(status.st_size, ERASED_BYTES)), 0)
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _remove_on_error(path: Path) -> Generator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            erase(path)
        raise


def _read_parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while part := file.read(files.READ_BYTES):
            yield part
