"""Content-addressed files, in a folder or an object store, hashed while they are written.

A blob exists completely or not at all. Only the blobs that the database references are needed. At the start
`remove_orphans` removes the others; later a `Sweep` does, except for blobs that were written but not settled: `settle`
ends this protection when the database references a blob or never will. Everything here blocks, but for `local`: asyncio
calls it in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import hashlib
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from fedplat import durable
from fedplat.wire import digests
from fedplat_server import crash_points, logs
from fedplat_server.instruments import Instruments
from fedplat_server.storage import blob_folder, files, ownership

_NUM_FETCHES = 4
"""The number of blobs that are fetched at the same time."""


class BlobStore:
    """The blobs of a database. Files that are not blobs yet are in `folder`, which is created if it does not exist.

    Methods raise `BlobFullError` if there is no room, `BlobUnavailableError` if an object store does not answer, and
    `BlobError` for other failures. A blob whose writing failed does not exist, and no part of it remains; an object
    store may have it nevertheless, as an orphan.
    """

    def __init__(
        self, folder: Path, instruments: Instruments | None = None, backend: blob_folder.BlobBackend | None = None
    ) -> None:
        """Without a `backend` the blobs are in the folder too."""
        self.folder = folder
        instruments = instruments or Instruments()
        self._backend = backend or blob_folder.BlobFolder(folder, instruments)
        self._sync_duration = instruments.blob_duration.labels("fsync", "folder")
        self.made: list[str] = []
        self.contents: dict[str, bytes] = {}
        self._other_digests = _OtherDigests()
        self._row_bytes = 0
        self._unsettled = blob_folder.UnsettledBlobs()
        self._fetches: dict[str, asyncio.Future[Path]] = {}
        self._threads = ThreadPoolExecutor(_NUM_FETCHES, "fetch blobs")
        with files.translate_os_errors(f"making the folder {folder}"):
            durable.make_folder(folder)

    def claim(self, database: ownership.Owner, mentioned: frozenset[str] = frozenset()) -> None:
        """Make a database, which mentions these digests, the owner of the blobs, before any is written or removed.

        Raises `ConfigError` if they belong to another database, or have no owner and most are unknown to this one.
        """
        self._backend.claim(database, mentioned)

    def recorder(self, row_bytes: int = 0) -> Self:
        """Return a view of this store that records the digests which it writes in its own list `made`.

        Blobs of `writer` with at most `row_bytes` are in its `contents`, for the database: only a copy is written here,
        without a sync. An object store needs no sync, and gets all blobs.
        """
        view = copy.copy(self)
        view.made, view.contents = [], {}
        view._row_bytes = row_bytes if self._backend.needs_sync else 0
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
        with self._unsettled.watch():
            yield Sweep(self._backend, self._unsettled)

    @contextlib.asynccontextmanager
    async def local(self, *digests: str) -> AsyncGenerator[Sequence[Path]]:
        """Yield the paths of local copies, which are kept within the block; for asyncio. "" is the path of "".

        Raises `BlobError` if a copy cannot be made.
        """
        with self._backend.hold(digests):
            for digest in digests:
                if digest and not self._backend.is_local(digest):
                    await asyncio.shield(self._begin_fetch(digest))  # others may wait for it too
            yield [self._backend.path(digest) if digest else Path() for digest in digests]

    def _begin_fetch(self, digest: str) -> asyncio.Future[Path]:
        """Return the fetch of a blob that is in progress, or start it.

        In threads of its own: a cohort that waits for a large model, or a store that is slow, must not use up those of
        asyncio, which receive updates.
        """

        def forget(done: asyncio.Future[Path]) -> None:
            del self._fetches[digest]
            if not done.cancelled():
                done.exception()  # read, also if all callers have left

        fetch = self._fetches.get(digest)
        if fetch is None:
            loop = asyncio.get_running_loop()
            fetch = self._fetches[digest] = loop.run_in_executor(self._threads, self._backend.fetch, digest)
            fetch.add_done_callback(forget)
        return fetch

    @contextlib.contextmanager
    def writer(self) -> Generator[BlobWriter]:
        """Store a blob that is written within the block; the writer's `blob` is its digest and size afterwards."""
        path = self._temporary()
        with files.translate_os_errors("writing a blob"), blob_folder.remove_on_error(path):
            with BlobWriter(path, self._row_bytes) as writer:
                with crash_points.step("blob.write"):
                    yield writer
                if writer.held is None and self._backend.needs_sync:
                    with self._sync_duration.time(), crash_points.step("blob.fsync"):
                        writer.sync()
            self._other_digests.note(writer)
            if writer.held is None:
                self._move_in(path, writer.blob.digest)
            else:
                self._put_copy(bytes(writer.held), writer.blob.digest)

    @contextlib.contextmanager
    def draft(self, path: Path) -> Generator[BlobWriter]:
        """Write a file that is not a blob yet, at a path of `temporary`."""
        with files.translate_os_errors("writing a draft of a blob"), create_hashed(path) as writer:
            yield writer

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
        self._sync(path)
        return self._adopt_synced(path, digest)

    def adopt_file(self, path: Path) -> Blob:
        """Hash a finished file of the same file system while it is synced, and move it into the store."""
        with ThreadPoolExecutor(1) as threads, files.translate_os_errors(f"adopting {path}"):
            syncing = threads.submit(self._sync, path)
            with path.open("rb", buffering=0) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            syncing.result()
        return self._adopt_synced(path, digest)

    def _sync(self, path: Path) -> None:
        if self._backend.needs_sync:
            with files.translate_os_errors(f"adopting {path}"), self._sync_duration.time():
                durable.sync(path)

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
        with blob_folder.temporary(self.folder) as path:
            yield path

    def path(self, digest: str) -> Path:
        """Return the local path of a blob, whether or not it is there: `local` and `fetch` see to that.

        Raises `BlobError` if `digest` is not a digest.
        """
        return self._backend.path(digest)

    def fetch(self, digest: str) -> Path:
        """Return the local path of a blob, after copying it there if it is in an object store only.

        The copy is kept for a minute at least.
        """
        return self._backend.fetch(digest)

    def find_blake3(self, digest: str) -> str:
        """Return the BLAKE3 of a blob (`fedplat.wire.digests`) that this process has written lately; else ""."""
        return self._other_digests.find(digest)

    def exists(self, digest: str) -> bool:
        """Return whether a blob exists, once a removal of it that is in progress has ended."""
        self.path(digest)
        self._unsettled.wait_until_removed(digest)
        return self._backend.exists(digest)

    def size(self, digest: str) -> int:
        """Return the size of a blob in bytes. Raises `BlobError` if it does not exist."""
        return self._backend.size(digest)

    def delete(self, digest: str) -> None:
        """Remove a blob, if it exists."""
        self._backend.delete(digest)

    def list_sizes(self) -> Mapping[str, int]:
        """Return the sizes of all blobs in bytes, by digest."""
        return self._backend.list_sizes()

    def all_digests(self) -> frozenset[str]:
        """Return the digests of all blobs."""
        return frozenset(self.list_sizes())

    def remove_orphans(self, stored: blob_folder.StoredDigests) -> blob_folder.Orphans:
        """Remove the blobs that the database has given up, set aside those that it does not know, and return how many.

        Also removes temporary files that a crash left, and what was set aside long enough ago.

        Only for the start: a blob that was just written is not referenced yet. An object store keeps the blobs that
        are not old enough (`blob_objects.MIN_AGE_S`).
        """
        blob_folder.remove_temporary(self.folder)
        self.expire()
        return self._backend.remove_orphans(stored)

    def take_back(self, digest: str) -> bool:
        """Make a blob that was set aside a blob again; return whether there was one."""
        return self._backend.take_back(digest)

    def expire(self) -> None:
        """Remove the blobs that were set aside long enough ago (`files.SET_ASIDE_KEEP_S`)."""
        self._backend.expire()

    def find_lost(self, digests: Collection[str]) -> list[str]:
        """Return those of these blobs that do not exist, or are damaged. Those in an object store are not read."""
        return self._backend.find_lost(digests)

    def restore(self, contents: Mapping[str, bytes]) -> None:
        """Write blobs again from their rows, which name them. Only for the start."""
        for digest, content in contents.items():
            if hashlib.sha256(content).hexdigest() != digest:
                logs.get().error("the row of a blob is damaged", digest=digest)
                continue
            with files.translate_os_errors(f"restoring the blob {digest}"):
                self._backend.put_copy(content, digest, self._unsettled)
            self.settle([digest])

    def _put_copy(self, content: bytes, digest: str) -> None:
        self.made.append(digest)
        self.contents[digest] = content
        self._backend.put_copy(content, digest, self._unsettled)

    def _temporary(self) -> Path:
        return self.folder / f"{uuid.uuid4().hex}{blob_folder.TEMPORARY}"

    def _move_in(self, source: Path, digest: str) -> None:
        self.made.append(digest)
        self._backend.move_in(source, digest, self._unsettled)


class Sweep:
    """A removal of blobs that the database does not reference, as read after the sweep began."""

    def __init__(self, backend: blob_folder.BlobBackend, unsettled: blob_folder.UnsettledBlobs) -> None:
        self._backend = backend
        self._unsettled = unsettled

    def remove(self, digests: Collection[str], *, older_than_s: float = 0.0) -> int:
        """Remove those of these blobs that exist, are settled and are old enough; return their total size in bytes."""
        return self._backend.sweep(digests, older_than_s, self._unsettled)

    def set_aside(self, digests: Collection[str], *, older_than_s: float = 0.0) -> int:
        """Set aside those of these blobs that exist, are settled and are old enough; return their size in bytes."""
        return self._backend.sweep(digests, older_than_s, self._unsettled, aside=True)


def _read_parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while part := file.read(files.READ_BYTES):
            yield part


_NUM_OTHER_DIGESTS = 1000
_MIN_THREAD_BYTES = 1 << 16
"""The smallest chunk for which hashing in a thread during the write is faster than hashing afterwards."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blob:
    """A stored file, by its SHA-256."""

    digest: str
    size_bytes: int


class BlobWriter:
    """A new file that is hashed while it is written: this takes 0.7 of the time if a second core is free.

    `held` has its bytes, and there is no file, as long as these are at most `held_bytes`; None: there is a file.
    """

    def __init__(self, path: Path, held_bytes: int = 0) -> None:
        self._path = path
        self._held_bytes = held_bytes
        self.held: bytearray | None = bytearray() if held_bytes else None
        self._descriptor = -1
        self._digest = hashlib.sha256()
        self._blake3 = digests.UpdateHash(digests.BLAKE3) if digests.has_blake3() else None
        self._size_bytes = 0
        self._writeback = files.Writeback()
        self._hasher = ThreadPoolExecutor(1, "hash a blob")

    def __enter__(self) -> Self:
        if self.held is None:
            self._descriptor = durable.create(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        self._hasher.shutdown()
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def write(self, chunk: durable.Bytes) -> None:
        """Append bytes. The caller may change them afterwards."""
        size_bytes = memoryview(chunk).nbytes
        if self.held is not None:
            if self._size_bytes + size_bytes <= self._held_bytes:
                self.held += chunk
                self._hash(chunk)
                self._size_bytes += size_bytes
                return
            self._descriptor = durable.create(self._path)
            durable.write_all(self._descriptor, self.held)
            self.held = None
        if size_bytes < _MIN_THREAD_BYTES:
            durable.write_all(self._descriptor, chunk)
            self._hash(chunk)
        else:
            hashing = self._hasher.submit(self._hash, chunk)
            try:
                durable.write_all(self._descriptor, chunk)
            finally:
                hashing.result()
        self._size_bytes += size_bytes
        self._writeback.on_written(self._descriptor, self._size_bytes)

    def _hash(self, chunk: durable.Bytes) -> None:
        self._digest.update(chunk)
        if self._blake3 is not None:
            self._blake3.update(chunk)

    def sync(self) -> None:
        """Make the file durable. Raises `OSError`."""
        os.fsync(self._descriptor)

    @property
    def blob(self) -> Blob:
        """The digest and size of the bytes written so far."""
        return Blob(self._digest.hexdigest(), self._size_bytes)

    @property
    def blake3(self) -> str:
        """The BLAKE3 of the bytes written so far (`fedplat.wire.digests`); "" if this process does not have it."""
        return self._blake3.digest if self._blake3 is not None else ""


class _OtherDigests:
    """The BLAKE3 of blobs by their SHA-256, of those that were written last. Threads may use it."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, writer: BlobWriter) -> None:
        if writer.blake3:
            with self._lock:
                self._known[writer.blob.digest] = writer.blake3
                if len(self._known) > _NUM_OTHER_DIGESTS:
                    self._known.popitem(last=False)

    def find(self, digest: str) -> str:
        with self._lock:
            return self._known.get(digest, "")


@contextlib.contextmanager
def create_hashed(path: Path) -> Generator[BlobWriter]:
    """Write a new file within the block. It is not synced."""
    with BlobWriter(path) as writer:
        yield writer
