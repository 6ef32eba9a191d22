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

from fedplat_server import crash_points
from fedplat_server.errors import BlobError
from fedplat_server.instruments import Instruments
from fedplat_server.storage import files, ownership
from fedplat_server.storage.blob_backend import BlobBackend, UnsettledBlobs
from fedplat_server.storage.blob_cache import BlobCache
from fedplat_server.storage.blob_folder import path_of
from fedplat_server.storage.object_store import ObjectStore, Stored

MIN_AGE_S = 3600.0
"""The minimum age of a blob that is removed."""
FOLDER = "blobs"
_CLOCK = "fedplat-clock"


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
    def claim(self, database_id: str) -> None:
        ownership.claim_store(self.objects, database_id)

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
    def remove_orphans(self, referenced: Collection[str]) -> int:
        until: float | None = None
        removed = 0
        for digest, stored in list(list_objects(self.objects)):
            if digest in referenced:
                continue
            until = self._now() - MIN_AGE_S if until is None else until
            if stored.modified_unix_s <= until:
                self.delete(digest)
                removed += 1
        return removed

    @override
    def sweep(self, digests: Collection[str], older_than_s: float, unsettled: UnsettledBlobs) -> int:
        # Most are too young, since retention looks at them as soon as the next version is there: do not ask for these.
        until_s = time.monotonic() - MIN_AGE_S
        young = {digest: at for digest, at in self._written.copy().items() if at > until_s}
        self._written = young  # a write that is forgotten meanwhile is only looked up in the store
        digests = [digest for digest in sorted(digests) if digest not in young]
        if not digests:
            return 0
        size_bytes, until = 0, self._now() - max(older_than_s, MIN_AGE_S)
        for digest in digests:
            with unsettled.removing(digest) as may_remove:
                if not may_remove:
                    continue
                stored = self.objects.head(name_of(digest))
                if stored is None or stored.modified_unix_s > until:
                    continue
                self.delete(digest)
                size_bytes += stored.size_bytes
        return size_bytes

    def _read(self, digest: str, limit_bytes: int) -> Iterable[memoryview]:
        with self._get_duration.time():
            yield from self.objects.read_parts(name_of(digest), limit_bytes)

    def _now(self) -> float:
        """Return the time on the clock of the store: that of an object that is written now."""
        self.objects.put(_CLOCK, b"")
        stored = self.objects.head(_CLOCK)
        if stored is None:
            raise BlobError(f"{self.objects.url} does not have what was just written to it")
        return stored.modified_unix_s


def name_of(digest: str) -> str:
    """Return the name of a blob's object. Raises `BlobError` if `digest` is not a digest."""
    return str(path_of(Path(FOLDER), digest))


def list_objects(objects: ObjectStore) -> Iterator[tuple[str, Stored]]:
    """Yield the blobs in a store, by digest; objects that are not blobs are left alone."""
    for stored in objects.list(FOLDER):
        digest = stored.name.rpartition("/")[2]
        if files.is_digest(digest) and stored.name == name_of(digest):
            yield digest, stored
