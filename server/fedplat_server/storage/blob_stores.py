"""The blobs of a data folder: which store a setting names, and its first minute with a database."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fedplat_server.config import DEFAULT_CACHE_BYTES, ServerConfig
from fedplat_server.errors import BlobError, ConfigError
from fedplat_server.instruments import Instruments
from fedplat_server.storage import blob_folder, blob_objects, object_store
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.object_store import ObjectStore


@dataclasses.dataclass(frozen=True, slots=True)
class BlobPlace:
    """Where blobs are: `url` is that of an object store, a folder, or "" for a folder in the data folder."""

    data_dir: Path
    url: str = ""
    cache_bytes: int = DEFAULT_CACHE_BYTES

    @classmethod
    def of(cls, config: ServerConfig) -> BlobPlace:
        """Return the place of a daemon's blobs."""
        return cls(config.data_dir, config.blobs, config.blob_cache_bytes)

    @property
    def folder(self) -> Path:
        """The folder of the blobs, if they are in one."""
        return Path(self.url) if self.url else self.data_dir / "blobs"

    @property
    def is_remote(self) -> bool:
        """The statement that the blobs are in an object store."""
        return object_store.is_url(self.url)

    def check(self) -> None:
        """Raise `ConfigError` if the URL cannot be used, or its library is not installed."""
        if self.is_remote:
            self.open_objects()
        elif "://" in self.url:
            raise ConfigError(f"--blobs {self.url[:200]}: expected a folder, or {object_store.EXPECTED}")

    def open_objects(self) -> ObjectStore:
        """Return the object store. Raises `ConfigError` if its URL cannot be used."""
        return ObjectStore(self.url)

    def open(self, instruments: Instruments | None = None) -> BlobStore:
        """Return the blobs. Raises `ConfigError` or `BlobError` if they cannot be used."""
        if not self.is_remote:
            self.check()
            made = instruments or Instruments()
            return BlobStore(self.folder, made, blob_folder.BlobFolder(self.folder, made, is_claimed=bool(self.url)))
        cache = blob_objects.BlobCache(self.data_dir / "blob-cache", self.cache_bytes)
        backend = blob_objects.BlobObjects(self.open_objects(), cache, instruments or Instruments())
        return BlobStore(cache.folder, instruments, backend)


@dataclasses.dataclass(frozen=True, slots=True)
class Reconciled:
    """What the start found: blobs that were removed or set aside, that came back, or are missing."""

    orphans: blob_folder.Orphans
    copied: int
    missing: frozenset[str]


def reconcile(blobs: BlobStore, place: BlobPlace, stored: blob_folder.StoredDigests) -> Reconciled:
    """Remove what the database has given up, set aside what it does not know, and bring back what it needs.

    Missing blobs may have been set aside, or be in the data folder only, where they were before `--blobs`.
    """
    orphans = blobs.remove_orphans(stored)
    missing = stored.referenced - blobs.all_digests()
    found = {digest for digest in missing if blobs.take_back(digest)}
    former = place.data_dir / "blobs"
    outside = {digest for digest in missing - found if place.url and blob_folder.path_of(former, digest).is_file()}
    for digest in sorted(outside):
        copied = blobs.put_file(blob_folder.path_of(former, digest))
        blobs.settle([copied.digest])
        if copied.digest != digest:
            raise BlobError(f"the blob {blob_folder.path_of(former, digest)} is damaged: its digest is {copied.digest}")
    return Reconciled(orphans, len(found | outside), missing - found - outside)
