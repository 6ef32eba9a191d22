"""Blobs in an object store: `blobs/aa/bb/<sha256>` below its URL, with a cache of local copies.

A blob is uploaded before the database references it, and uploaded again if it is written again: this renews its time.
Other daemons of the database may be writing too, on other hosts. So blobs are removed only when they are
`MIN_AGE_S` old on the clock of the store. The bytes of removed objects cannot be overwritten: what becomes of them is
up to the store.

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
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from typing_extensions import override

from fedplat.privacy import noise
from fedplat_server import crash_points, logs
from fedplat_server.errors import BlobError, BlobUnavailableError
from fedplat_server.instruments import Instruments
from fedplat_server.storage import blob_folder, blobs, files, object_store, ownership
from fedplat_server.storage.ownership import Contents, Owner

MIN_AGE_S = 3600.0
"""The minimum age of a blob that is removed."""
FOLDER = "blobs"
ASIDE = f"{files.SET_ASIDE_FOLDER}/{FOLDER}"


class BlobObjects(blob_folder.BlobBackend):
    """The blobs in an object store, and the cache of their local copies."""

    needs_sync = False

    def __init__(self, objects: object_store.ObjectStore, cache: BlobCache, instruments: Instruments) -> None:
        self.objects = objects
        self._cache = cache
        durations, store = instruments.blob_duration, objects.scheme
        self._put_duration = durations.labels("put", store)
        self._get_duration = durations.labels("get", store)
        self._delete_duration = durations.labels("delete", store)
        self._written: dict[str, float] = {}

    @override
    def claim(self, database: Owner, mentioned: frozenset[str]) -> None:
        ownership.claim_store(self.objects, database, lambda: Contents.of(frozenset(self.list_sizes()), mentioned))

    @override
    def path(self, digest: str) -> Path:
        return self._cache.path(digest)

    @override
    def fetch(self, digest: str) -> Path:
        return self._cache.get(digest, self._read)

    @override
    def is_local(self, digest: str) -> bool:
        return self._cache.has(digest)

    @override
    def hold(self, digests: Iterable[str]) -> AbstractContextManager[None]:
        return self._cache.hold(digests)

    @override
    def exists(self, digest: str) -> bool:
        return self.objects.head(name_of(digest)) is not None

    @override
    def size(self, digest: str) -> int:
        found = self.objects.head(name_of(digest))
        if found is None:
            raise BlobError(f"the blob {digest} is not in {self.objects.url}")
        return found.size_bytes

    @override
    def list_sizes(self) -> Mapping[str, int]:
        return {digest: stored.size_bytes for digest, stored in list_objects(self.objects)}

    @override
    def move_in(self, source: Path, digest: str, unsettled: blob_folder.UnsettledBlobs) -> None:
        unsettled.add(digest)
        unsettled.wait_until_removed(digest)
        self._written[digest] = time.monotonic()
        with self._put_duration.time(), crash_points.step("object.put"):
            self.objects.put_file(name_of(digest), source)
        with crash_points.step("object.cache"):
            self._cache.put(source, digest)

    @override
    def put_copy(self, content: bytes, digest: str, unsettled: blob_folder.UnsettledBlobs) -> None:
        with blob_folder.temporary(self._cache.folder) as draft:
            blob_folder.write_draft(draft, content)
            self.move_in(draft, digest, unsettled)

    @override
    def find_lost(self, digests: Collection[str]) -> list[str]:
        return sorted({*digests} - self.list_sizes().keys()) if digests else []

    @override
    def delete(self, digest: str) -> None:
        with self._delete_duration.time(), crash_points.step("object.delete"):
            self._cache.drop(digest)
            self.objects.delete([name_of(digest)])

    @override
    def remove_orphans(self, stored: blob_folder.StoredDigests) -> blob_folder.Orphans:
        until: float | None = None
        removed = num_aside = 0
        for digest, found in list(list_objects(self.objects)):
            if digest in stored.referenced:
                continue
            until = self.objects.read_clock() - MIN_AGE_S if until is None else until
            if found.modified_unix_s > until:
                continue
            if digest in stored.given_up:
                self.delete(digest)
                removed += 1
            elif self._set_aside(digest):
                num_aside += 1
        return blob_folder.Orphans(removed, num_aside)

    @override
    def take_back(self, digest: str) -> bool:
        if self.objects.head(_aside_name(digest)) is None:
            return False
        self.objects.copy(_aside_name(digest), name_of(digest))
        return True

    @override
    def expire(self) -> None:
        self.objects.expire(ASIDE, files.SET_ASIDE_KEEP_S)

    def _set_aside(self, digest: str) -> bool:
        """Set a blob aside; return False if the store cannot copy it, such as one of more than 5 GiB on S3.

        States with seeds of noise are removed at once.
        """
        try:
            if not noise.has_seeds(self.objects.read_beginning(name_of(digest), files.BEGINNING_BYTES)):
                self.objects.copy(name_of(digest), _aside_name(digest))
        except BlobUnavailableError:
            raise
        except BlobError as exc:
            logs.get().warning("an unknown blob stays where it is", digest=digest, error=str(exc))
            return False
        self.delete(digest)
        return True

    @override
    def sweep(
        self,
        digests: Collection[str],
        older_than_s: float,
        unsettled: blob_folder.UnsettledBlobs,
        *,
        aside: bool = False,
    ) -> int:
        # Most are too young, since retention looks at them as soon as the next version is there: do not ask for these.
        until_s = time.monotonic() - MIN_AGE_S
        young = {digest: at for digest, at in self._written.copy().items() if at > until_s}
        self._written = young  # a write that is forgotten meanwhile is only looked up in the store
        digests = [digest for digest in sorted(digests) if digest not in young]
        if not digests:
            return 0
        size_bytes, until = 0, self.objects.read_clock() - max(older_than_s, MIN_AGE_S)
        for digest in digests:
            with unsettled.removing(digest) as may_remove:
                if not may_remove:
                    continue
                stored = self.objects.head(name_of(digest))
                if stored is None or stored.modified_unix_s > until:
                    continue
                if aside:
                    is_gone = self._set_aside(digest)
                else:
                    is_gone = True
                    self.delete(digest)
                size_bytes += stored.size_bytes if is_gone else 0
        return size_bytes

    def _read(self, digest: str, limit_bytes: int) -> Iterable[memoryview]:
        with self._get_duration.time():
            yield from self.objects.read_parts(name_of(digest), limit_bytes)


def name_of(digest: str) -> str:
    """Return the name of a blob's object. Raises `BlobError` if `digest` is not a digest."""
    return str(blob_folder.path_of(Path(FOLDER), digest))


def _aside_name(digest: str) -> str:
    return f"{ASIDE}/{digest}"


def list_objects(objects: object_store.ObjectStore) -> Iterator[tuple[str, object_store.Stored]]:
    """Yield the blobs in a store, by digest; objects that are not blobs are left alone."""
    for stored in objects.list(FOLDER):
        digest = stored.name.rpartition("/")[2]
        if files.is_digest(digest) and stored.name == name_of(digest):
            yield digest, stored


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
                if path == (self.path(path.name) if files.is_digest(path.name) else None):
                    with contextlib.suppress(FileNotFoundError):  # another daemon of this host may use the folder
                        found.append((path.stat(), path.name))
        for status, digest in sorted(found, key=lambda one: one[0].st_mtime):
            self._copies[digest] = _Copy(status.st_size, clock() - GRACE_S, is_verified=False)
        self._evict()

    def path(self, digest: str) -> Path:
        """Return the path of a copy, whether or not it is there."""
        return blob_folder.path_of(self.folder, digest)

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
        with self._lock:
            if (copy := self._copies.get(digest)) is not None:
                copy.used_at = self._clock()
                self._copies.move_to_end(digest)
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
            blob_folder.erase(self.path(digest))

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
        with files.translate_os_errors(f"copying the blob {digest}"), blob_folder.temporary(self.folder) as draft:
            with blobs.create_hashed(draft) as writer:
                for part in read(digest, self._limit_bytes):
                    writer.write(part)
            if writer.blob.digest != digest:
                raise BlobError(f"the blob {digest} is damaged in the object store: its digest is {writer.blob.digest}")
            self.put(draft, digest)

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
