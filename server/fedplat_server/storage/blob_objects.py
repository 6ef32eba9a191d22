"""Blobs in an object store: `blobs/aa/bb/<sha256>` below its URL, with a cache of local copies.

A blob is uploaded before the database references it, and uploaded again if it is written again: this renews its time.
Other daemons of the database may be writing too, on other hosts. So blobs are removed only when they are
`MIN_AGE_S` old on the clock of the store. The bytes of removed objects cannot be overwritten: what becomes of them is
up to the store.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from typing_extensions import override

from fedplat.privacy import noise
from fedplat_server import crash_points, logs
from fedplat_server.errors import BlobError, BlobUnavailableError
from fedplat_server.instruments import Instruments
from fedplat_server.storage import files, ownership, set_aside
from fedplat_server.storage.blob_backend import BlobBackend, Orphans, StoredDigests, UnsettledBlobs
from fedplat_server.storage.blob_cache import BlobCache
from fedplat_server.storage.blob_folder import path_of
from fedplat_server.storage.object_store import ObjectStore, Stored
from fedplat_server.storage.ownership import Contents, Owner

MIN_AGE_S = 3600.0
"""The minimum age of a blob that is removed."""
FOLDER = "blobs"
ASIDE = f"{set_aside.FOLDER}/{FOLDER}"


class BlobObjects(BlobBackend):
    """The blobs in an object store, and the cache of their local copies."""

    needs_sync = False

    def __init__(self, objects: ObjectStore, cache: BlobCache, instruments: Instruments) -> None:
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
    def move_in(self, source: Path, digest: str, unsettled: UnsettledBlobs) -> None:
        unsettled.add(digest)
        unsettled.wait_until_removed(digest)
        self._written[digest] = time.monotonic()
        with self._put_duration.time(), crash_points.step("object.put"):
            self.objects.put_file(name_of(digest), source)
        with crash_points.step("object.cache"):
            self._cache.put(source, digest)

    @override
    def delete(self, digest: str) -> None:
        with self._delete_duration.time(), crash_points.step("object.delete"):
            self._cache.drop(digest)
            self.objects.delete([name_of(digest)])

    @override
    def remove_orphans(self, stored: StoredDigests) -> Orphans:
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
        return Orphans(removed, num_aside)

    @override
    def take_back(self, digest: str) -> bool:
        if self.objects.head(_aside_name(digest)) is None:
            return False
        self.objects.copy(_aside_name(digest), name_of(digest))
        return True

    @override
    def expire(self) -> None:
        self.objects.expire(ASIDE, set_aside.KEEP_S)

    def _set_aside(self, digest: str) -> bool:
        """Set a blob aside; return False if the store cannot copy it, such as one of more than 5 GiB on S3.

        States with seeds of noise are removed at once.
        """
        try:
            if not noise.has_seeds(self.objects.read_beginning(name_of(digest), set_aside.BEGINNING_BYTES)):
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
        self, digests: Collection[str], older_than_s: float, unsettled: UnsettledBlobs, *, aside: bool = False
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
    return str(path_of(Path(FOLDER), digest))


def _aside_name(digest: str) -> str:
    return f"{ASIDE}/{digest}"


def list_objects(objects: ObjectStore) -> Iterator[tuple[str, Stored]]:
    """Yield the blobs in a store, by digest; objects that are not blobs are left alone."""
    for stored in objects.list(FOLDER):
        digest = stored.name.rpartition("/")[2]
        if files.is_digest(digest) and stored.name == name_of(digest):
            yield digest, stored
