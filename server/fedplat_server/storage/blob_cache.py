"""Local copies of blobs, in a folder of limited size: those that were used last are kept.

A copy is hashed before it is used for the first time in a process, so that neither the store nor a power cut, a bad
disk or another program can put other bytes in its place. Copies are not synced: the store has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

from fedplat_server import logs
from fedplat_server.errors import BlobError
from fedplat_server.storage import files
from fedplat_server.storage.blob_folder import erase, path_of, temporary
from fedplat_server.storage.blob_writer import create_hashed

Read = Callable[[str, int], Iterable[memoryview]]
"""A function that yields the bytes of a blob, at most so many."""
GRACE_S = 60.0
"""A copy is kept for this time after its last use, also if the cache is full: its path may be about to be opened."""


@dataclasses.dataclass(slots=True)
class _Copy:
    size_bytes: int
    used_at: float
    is_verified: bool


class BlobCache:
    """The local copies. `limit_bytes` may be exceeded by copies that are held or were used within `GRACE_S`."""

    def __init__(self, folder: Path, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        """By digest; the first one was not used for the longest time."""
        self._held = Counter[str]()
        self._fetches: dict[str, threading.Lock] = {}
        with files.translate_os_errors(f"reading the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
            found: list[tuple[os.stat_result, str]] = []
            for path in files.list_files(folder):
                if path == self._find(path.name):
                    with contextlib.suppress(FileNotFoundError):  # another daemon of this host may use the folder
                        found.append((path.stat(), path.name))
        for status, digest in sorted(found, key=lambda one: one[0].st_mtime):
            self._copies[digest] = _Copy(status.st_size, clock() - GRACE_S, is_verified=False)
        self._evict()

    def path(self, digest: str) -> Path:
        """Return the path of a copy, whether or not it is there."""
        return path_of(self.folder, digest)

    def has(self, digest: str) -> bool:
        """Return whether `get` would return at once."""
        with self._lock:
            copy = self._copies.get(digest)
        return copy is not None and copy.is_verified and self.path(digest).is_file()

    def get(self, digest: str, read: Read) -> Path:
        """Return the path of a copy, which is made if it is not there. Raises `BlobError` if its digest is wrong."""
        path = self.path(digest)
        if not self.has(digest):
            with self._lock:
                fetch = self._fetches.setdefault(digest, threading.Lock())
            with fetch:  # one copy is enough for those who want it at the same time
                if not self.has(digest) and not self._verify(digest, path):
                    self._fetch(digest, path, read)
            with self._lock:
                self._fetches.pop(digest, None)
        self._note_use(digest)
        return path

    def put(self, source: Path, digest: str) -> None:
        """Move a finished file with this digest into the folder."""
        path = self.path(digest)
        with files.translate_os_errors(f"moving {source}"):
            size_bytes = source.stat().st_size
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(source, path)
        with self._lock:
            self._copies[digest] = _Copy(size_bytes, self._clock(), is_verified=True)
        self._evict()

    def drop(self, digest: str) -> None:
        """Erase the copy of a blob that is removed, if there is one."""
        with self._lock:
            self._copies.pop(digest, None)
        with files.translate_os_errors(f"removing the copy of the blob {digest}"):
            erase(self.path(digest))

    @contextlib.contextmanager
    def hold(self, digests: Iterable[str]) -> Generator[None]:
        """Keep copies within the block."""
        held = Counter(digests)
        with self._lock:
            self._held += held
        try:
            yield
        finally:
            with self._lock:
                self._held -= held

    def _find(self, name: str) -> Path | None:
        return self.path(name) if files.is_digest(name) else None

    def _verify(self, digest: str, path: Path) -> bool:
        """Hash a copy of an earlier process; return False if it is not there or was damaged."""
        try:
            with path.open("rb", buffering=0) as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
                size_bytes = os.fstat(file.fileno()).st_size
        except OSError:
            return False
        if found != digest:
            logs.get().warning("a local copy of a blob is damaged; it is fetched again", digest=digest)
            return False
        with self._lock:
            self._copies[digest] = _Copy(size_bytes, self._clock(), is_verified=True)
        return True

    def _fetch(self, digest: str, path: Path, read: Read) -> None:
        with files.translate_os_errors(f"copying the blob {digest}"), temporary(self.folder) as draft:
            with create_hashed(draft) as writer:
                for part in read(digest, self._limit_bytes):
                    writer.write(part)
            if writer.blob.digest != digest:
                raise BlobError(f"the blob {digest} is damaged in the object store: its digest is {writer.blob.digest}")
            self.put(draft, digest)

    def _note_use(self, digest: str) -> None:
        with self._lock:
            if (copy := self._copies.get(digest)) is not None:
                copy.used_at = self._clock()
                self._copies.move_to_end(digest)

    def _evict(self) -> None:
        """Remove the copies that were not used for the longest time. Open files stay readable: they are unlinked."""
        with self._lock:
            excess = sum(copy.size_bytes for copy in self._copies.values()) - self._limit_bytes
            until = self._clock() - GRACE_S
            for digest, copy in list(self._copies.items()):
                if excess <= 0:
                    break
                if copy.used_at <= until and not self._held[digest]:
                    with contextlib.suppress(OSError):
                        self.path(digest).unlink(missing_ok=True)
                    excess -= copy.size_bytes
                    del self._copies[digest]
