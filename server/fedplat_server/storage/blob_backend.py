"""Where finished blobs are, as a port: a folder or an object store."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from fedplat_server.storage.ownership import Owner


class StoredDigests(NamedTuple):
    """The digests that a database mentions: those of kept models, deltas and states, and those that it has given up."""

    referenced: frozenset[str] = frozenset()
    given_up: frozenset[str] = frozenset()

    @property
    def mentioned(self) -> frozenset[str]:
        """All of them. Any other blob may be one of another database, or of a newer copy of this one."""
        return self.referenced | self.given_up


class Orphans(NamedTuple):
    """How many blobs were removed, since the database has given them up, and set aside, since it does not know them."""

    num_removed: int = 0
    num_set_aside: int = 0


class BlobBackend(Protocol):
    """The finished blobs. The methods block and are thread-safe; they raise `BlobError` and its subclasses."""

    needs_sync: bool
    """Whether a file must be durable before `move_in`."""

    @abstractmethod
    def claim(self, database: Owner, mentioned: frozenset[str]) -> None:
        """Make a database, which mentions these digests, the owner of the blobs.

        Raises `ConfigError` if they belong to another database, or have no owner and most are unknown to this one.
        """

    @abstractmethod
    def path(self, digest: str) -> Path:
        """Return the local path of a blob, whether or not it is there."""

    @abstractmethod
    def fetch(self, digest: str) -> Path:
        """Return the local path of a blob, after copying it there if it is elsewhere."""

    @abstractmethod
    def is_local(self, digest: str) -> bool:
        """Return whether `fetch` would return at once."""

    @abstractmethod
    def hold(self, digests: Iterable[str]) -> AbstractContextManager[None]:
        """Keep the local copies of blobs within the block, once they are fetched."""

    @abstractmethod
    def exists(self, digest: str) -> bool:
        """Return whether a blob exists."""

    @abstractmethod
    def size(self, digest: str) -> int:
        """Return the size of a blob in bytes. Raises `BlobError` if it does not exist."""

    @abstractmethod
    def list_sizes(self) -> Mapping[str, int]:
        """Return the sizes of all blobs in bytes."""

    @abstractmethod
    def move_in(self, source: Path, digest: str, unsettled: UnsettledBlobs) -> None:
        """Make a finished local file a blob, durably, and add it to those that are unsettled."""

    @abstractmethod
    def delete(self, digest: str) -> None:
        """Remove a blob, if it exists."""

    @abstractmethod
    def remove_orphans(self, stored: StoredDigests) -> Orphans:
        """Remove the blobs that the database has given up, and set unknown ones aside. Only for the start."""

    @abstractmethod
    def sweep(
        self, digests: Collection[str], older_than_s: float, unsettled: UnsettledBlobs, *, aside: bool = False
    ) -> int:
        """Remove those of these blobs that exist, are settled and are old enough; return their size in bytes.

        With `aside` they are set aside, for `set_aside.KEEP_S`.
        """

    @abstractmethod
    def take_back(self, digest: str) -> bool:
        """Make a blob that was set aside a blob again; return whether there was one."""

    @abstractmethod
    def expire(self) -> None:
        """Remove the blobs that were set aside long enough ago."""


class UnsettledBlobs:
    """The blobs that sweeps must keep: how often each was written or protected without being settled. Thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._counts = Counter[str]()
        self._watched: set[str] | None = None
        self._removing: set[str] = set()
        self._removed = threading.Condition(self.lock)

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

    def is_kept(self, digest: str) -> bool:
        """Return whether the sweep in progress must keep a blob."""
        with self.lock:
            return digest in self._counts if self._watched is None else digest in self._watched

    @contextlib.contextmanager
    def watch(self) -> Generator[None]:
        """Keep the blobs that are unsettled now or are added within the block, even if they are settled in it."""
        with self.lock:
            self._watched = set(self._counts)
        try:
            yield
        finally:
            self._watched = None

    @contextlib.contextmanager
    def removing(self, digest: str) -> Generator[bool]:
        """Make `wait_until_removed` wait for the end of the block; yield False if the blob must be kept."""
        with self.lock:
            is_kept = self.is_kept(digest)
            if not is_kept:
                self._removing.add(digest)
        try:
            yield not is_kept
        finally:
            with self.lock:
                self._removing.discard(digest)
                self._removed.notify_all()

    def wait_until_removed(self, digest: str) -> None:
        """Wait until no removal of this blob is in progress: what is then written stays."""
        with self.lock:
            self._removed.wait_for(lambda: digest not in self._removing)
