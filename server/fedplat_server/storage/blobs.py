"""Content-addressed files: `folder/aa/bb/<sha256>`, where aa and bb are the first digits of the digest.

A blob is there as a whole or not at all: it is written under a temporary name, synced, renamed, and its folder
synced. Which blobs are needed, only the database knows. At the start `remove_orphans` removes the others; later a
`Sweep` does, which leaves alone what was written and is not yet named by the database (`settle` says that it is, or
never will be). Everything here blocks: asyncio calls it in threads.

What is removed is overwritten first, as far as seeds of noise may be in it: they are among the numbers at the beginning
of a rule's state. What a file system keeps beside that (journals, snapshots, spare blocks) is out of reach.
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
from fedplat_server.storage import files

_TEMPORARY = ".tmp"
ERASED_BYTES = 1 << 20
"""How much of the beginning of a file is overwritten when it is removed."""
_WORTH_A_THREAD = 1 << 16
"""Bytes from which on hashing beside writing saves more than handing them to a thread costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Blob:
    """What was stored."""

    digest: str
    size_bytes: int


class BlobWriter:
    """Writes bytes to a file and hashes them at the same time: 0.7 of the time, where a second core is free."""

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
        """Appends bytes, which may be changed afterwards."""
        size_bytes = memoryview(chunk).nbytes
        if size_bytes < _WORTH_A_THREAD:
            durable.write_all(self._descriptor, chunk)
            self._digest.update(chunk)
        else:
            hashed = self._hasher.submit(self._digest.update, chunk)
            try:
                durable.write_all(self._descriptor, chunk)
            finally:
                hashed.result()
        self._size_bytes += size_bytes
        self._writeback.on_written(self._descriptor, self._size_bytes)

    @property
    def blob(self) -> Blob:
        """What was written so far."""
        return Blob(self._digest.hexdigest(), self._size_bytes)


class BlobStore:
    """Blobs in a folder, which is made if it is not there.

    Errors are `BlobFullError` when there is no room on the disk, and `BlobError`. After either the blob counts as
    not written, and nothing of it is left.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[str] = []
        self._synced: set[Path] = set()
        self._young = _Young()
        with files.translate_os_errors(f"making the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def recorder(self) -> Self:
        """The same blobs; what is written by way of it is in its own list `made`."""
        same = copy.copy(self)
        same.made = []
        return same

    def settle(self, digests: Iterable[str]) -> None:
        """Says that the database names these blobs, or never will: each of them once for each time it was written."""
        self._young.settle(digests)

    @contextlib.contextmanager
    def protect(self, digest: str) -> Generator[None]:
        """Lets no sweep remove a blob that the database is about to name."""
        self._young.add(digest)
        try:
            yield
        finally:
            self.settle([digest])

    @contextlib.contextmanager
    def sweep(self) -> Generator[Sweep]:
        """Removes blobs within the block. One at a time."""
        with self._young.watch() as skipped:
            yield Sweep(self, self._young, skipped)

    @contextlib.contextmanager
    def writer(self) -> Generator[BlobWriter]:
        """Stores what is written within the block; after it, `blob` of the writer says what that was."""
        temporary = self._temporary()
        with files.translate_os_errors("writing a blob"), _removed_on_error(temporary):
            descriptor = durable.create(temporary)
            try:
                with crash_points.step("blob.write"), BlobWriter(descriptor) as writer:
                    yield writer
                with crash_points.step("blob.fsync"):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._move_in(temporary, writer.blob.digest)

    @contextlib.contextmanager
    def draft(self, path: Path) -> Generator[BlobWriter]:
        """Writes a file that is no blob yet, at a path of `temporary`."""
        with files.translate_os_errors("writing a draft of a blob"):
            descriptor = durable.create(path)
            try:
                with BlobWriter(descriptor) as writer:
                    yield writer
            finally:
                os.close(descriptor)

    def put_chunks(self, chunks: Iterable[durable.Bytes]) -> Blob:
        """Stores bytes that come in parts."""
        with self.writer() as writer:
            for chunk in chunks:
                writer.write(chunk)
        return writer.blob

    def put_file(self, path: Path) -> Blob:
        """Stores a copy of a file."""
        return self.put_chunks(_parts(path))

    def adopt(self, path: Path, digest: str) -> Blob:
        """Moves a finished file of the same file system in; the caller has computed its digest."""
        self.path(digest)
        with files.translate_os_errors(f"adopting {path}"):
            durable.sync(path)
            size_bytes = path.stat().st_size
            self._move_in(path, digest)
        return Blob(digest, size_bytes)

    def take(self, path: Path) -> Blob:
        """Moves a finished file of the same file system in, whoever has written it."""
        with files.translate_os_errors(f"reading {path}"), path.open("rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return self.adopt(path, digest)

    @contextlib.contextmanager
    def temporary(self) -> Generator[Path]:
        """A path for a file that is to be taken in. What is there after the block, or after a crash, is removed."""
        path = self._temporary()
        try:
            yield path
        finally:
            with contextlib.suppress(OSError):
                erase(path)

    def path(self, digest: str) -> Path:
        """Where a blob is, if it is there. Raises `BlobError` if the digest is none: no other path can be named."""
        if not files.is_digest(digest):
            raise BlobError(f"{digest[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
        return self.folder / digest[:2] / digest[2:4] / digest

    def exists(self, digest: str) -> bool:
        """Whether a blob is there."""
        return self.path(digest).is_file()

    def size(self, digest: str) -> int:
        """How many bytes a blob has. Raises `BlobError` if it is not there."""
        with files.translate_os_errors(f"reading the blob {digest}"):
            return self.path(digest).stat().st_size

    def delete(self, digest: str) -> None:
        """Removes a blob, if it is there."""
        with files.translate_os_errors(f"removing the blob {digest}"):
            erase(self.path(digest))

    def all_digests(self) -> frozenset[str]:
        """The digests of all blobs."""
        with files.translate_os_errors("listing the blobs"):
            return frozenset(path.name for path in self.folder.glob("??/??/*") if files.is_digest(path.name))

    def remove_orphans(self, referenced: frozenset[str]) -> int:
        """Removes blobs that are not referenced, and returns how many; and temporary files of a crash.

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
        # A blob of this digest that is there already is replaced: its entry in the folder might not be durable.
        self.made.append(digest)
        with crash_points.step("blob.rename"), self._young.lock:
            self._young.add(digest)
            os.replace(source, target)
        with _removed_on_error(target), crash_points.step("blob.folder_sync"):
            durable.sync(folder)


class _Young:
    """The blobs that were written and that the database does not name yet, with how often; for several threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._counts = Counter[str]()
        self._watched: set[str] | None = None

    def add(self, digest: str) -> None:
        """Counts a blob that is being written, or is about to be named."""
        with self.lock:
            self._counts[digest] += 1
            if self._watched is not None:
                self._watched.add(digest)

    def settle(self, digests: Iterable[str]) -> None:
        """Counts blobs whose fate is stored."""
        with self.lock:
            for digest in digests:
                self._counts[digest] -= 1
                if self._counts[digest] <= 0:
                    del self._counts[digest]

    @contextlib.contextmanager
    def watch(self) -> Generator[set[str]]:
        """The blobs that are young now, or become so within the block."""
        with self.lock:
            watched = self._watched = set(self._counts)
        try:
            yield watched
        finally:
            self._watched = None


class Sweep:
    """Removes blobs that the database does not name, by what was read of it after the sweep began."""

    def __init__(self, blobs: BlobStore, young: _Young, skipped: set[str]) -> None:
        self._blobs = blobs
        self._young = young
        self._skipped = skipped

    def remove(self, digests: Collection[str], *, older_than_s: float = 0.0) -> int:
        """Removes those that are there, not young, and old enough, and returns how many bytes they had."""
        size_bytes, until = 0, time.time() - older_than_s
        for digest in sorted(digests):
            path = self._blobs.path(digest)
            with files.translate_os_errors(f"removing {path}"), self._blobs.temporary() as aside, self._young.lock:
                if digest in self._skipped or not path.is_file() or path.stat().st_mtime > until:
                    continue
                size_bytes += path.stat().st_size
                with crash_points.step("retention.remove"):
                    os.replace(path, aside)
        return size_bytes


def erase(path: Path) -> None:
    """Removes a file, if it is there, after its beginning was overwritten.

    One that has a second name, as hard links of a backup are, is left as it is there.
    """
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if found.st_nlink == 1:
                os.pwrite(descriptor, bytes(min(found.st_size, ERASED_BYTES)), 0)
                os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Generator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            erase(path)
        raise


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while part := file.read(files.READ_BYTES):
            yield part
