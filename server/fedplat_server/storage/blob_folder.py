"""Where finished blobs are: the port of a store, and blobs in a folder, `folder/aa/bb/<sha256>`.

A blob is synced, renamed, and its folder is synced. If it is a row of the database, too, its file is only a copy, which
is not synced: the next start writes it again if the disk has lost it.

Before a file is removed its beginning is overwritten, since the numbers at the beginning of a rule's state may include
seeds of noise. Other copies of a file system (journals, snapshots, spare blocks) are out of reach.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import threading
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from typing_extensions import override

from fedplat import durable
from fedplat.privacy import noise
from fedplat_server import crash_points, errors, logs
from fedplat_server.instruments import Instruments
from fedplat_server.storage import files, ownership
from fedplat_server.storage.ownership import Contents, Owner

_DAMAGED = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
"""What a file system says of a file that the disk cannot give back."""


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
    def put_copy(self, content: bytes, digest: str, unsettled: UnsettledBlobs) -> None:
        """Write the local copy of a blob that is, or is about to be, a row of the database; it may be lost."""

    @abstractmethod
    def find_lost(self, digests: Collection[str]) -> list[str]:
        """Return those of these blobs that do not exist or, in a folder, are damaged."""

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

        With `aside` they are set aside, for `files.SET_ASIDE_KEEP_S`.
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


TEMPORARY = ".tmp"
INCOMING = "incoming-"
"""The beginning of the name of a temporary file of the module `tempfile`."""
_TEMPORARY_NAME = re.compile(f"([0-9a-f]{{32}}|{INCOMING}[a-z0-9_]{{8}}){re.escape(TEMPORARY)}")
ERASED_BYTES = 1 << 20
"""The number of bytes at the beginning of a file that are overwritten before it is removed."""


def path_of(folder: Path, digest: str) -> Path:
    """Return the path of a blob in a folder. Raises `BlobError` if `digest` is not a digest.

    The check makes paths outside the folder impossible.
    """
    if not files.is_digest(digest):
        raise errors.BlobError(f"{digest[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
    return folder / digest[:2] / digest[2:4] / digest


class BlobFolder(BlobBackend):
    """The blobs in a folder."""

    needs_sync = True

    def __init__(self, folder: Path, instruments: Instruments, *, is_claimed: bool = False) -> None:
        """`is_claimed`: whether the folder has an owner; a folder in the data folder needs none."""
        self._folder = folder
        self._is_claimed = is_claimed
        self._rename_duration = instruments.blob_duration.labels("rename", "folder")
        self._delete_duration = instruments.blob_duration.labels("delete", "folder")
        self._synced: set[Path] = set()
        self._copies: set[str] = set()  # those that were not synced

    @override
    def claim(self, database: Owner, mentioned: frozenset[str]) -> None:
        if self._is_claimed:
            ownership.claim_folder(
                self._folder,
                database,
                "models",
                lambda: Contents.of(files.find_digests(self._folder, "??/??/*"), mentioned),
            )

    @override
    def path(self, digest: str) -> Path:
        return path_of(self._folder, digest)

    @override
    def fetch(self, digest: str) -> Path:
        return self.path(digest)

    @override
    def is_local(self, digest: str) -> bool:
        return True

    @override
    @contextlib.contextmanager
    def hold(self, digests: Iterable[str]) -> Generator[None]:
        yield

    @override
    def exists(self, digest: str) -> bool:
        path = self.path(digest)
        if not path.is_file():
            return False
        if digest in self._copies:  # its caller relies on it, and it may never become a row
            with files.translate_os_errors(f"syncing the blob {digest}"):
                durable.sync(path)
                self._make_folder(path.parent)
                durable.sync(path.parent)
            self._copies.discard(digest)
        return True

    @override
    def size(self, digest: str) -> int:
        with files.translate_os_errors(f"reading the blob {digest}"):
            return self.path(digest).stat().st_size

    @override
    def list_sizes(self) -> Mapping[str, int]:
        sizes: dict[str, int] = {}
        with files.translate_os_errors("listing the blobs"):
            for path in files.match(self._folder, "??/??/*"):
                if files.is_digest(path.name):
                    with contextlib.suppress(FileNotFoundError):
                        sizes[path.name] = path.stat().st_size
        return sizes

    @override
    def move_in(self, source: Path, digest: str, unsettled: UnsettledBlobs) -> None:
        target = self.path(digest)
        folder = target.parent
        if folder not in self._synced:
            with crash_points.step("blob.new_folder"):
                self._make_folder(folder)
        # An existing blob with this digest is replaced: its entry in the folder might not be durable.
        with self._rename_duration.time():
            with crash_points.step("blob.rename"), unsettled.lock:
                unsettled.add(digest)
                os.replace(source, target)
            with remove_on_error(target), crash_points.step("blob.folder_sync"):
                durable.sync(folder)
        self._copies.discard(digest)

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        durable.sync(self._folder)
        durable.sync(folder.parent)
        self._synced.add(folder)

    @override
    def put_copy(self, content: bytes, digest: str, unsettled: UnsettledBlobs) -> None:
        target = self.path(digest)
        with unsettled.lock:
            unsettled.add(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary(self._folder) as draft:
            write_draft(draft, content)
            with crash_points.step("blob.copy"), unsettled.lock:
                if self._is_intact(digest):  # a file that may be synced is never replaced by one that is not
                    return
                self._copies.add(digest)
                os.replace(draft, target)

    @override
    def find_lost(self, digests: Collection[str]) -> list[str]:
        self._copies |= {*digests}  # an earlier life may not have synced them
        with files.translate_os_errors("reading the blobs"):
            return [digest for digest in sorted(digests) if not self._is_intact(digest)]

    def _is_intact(self, digest: str) -> bool:
        try:
            with self.path(digest).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == digest
        except FileNotFoundError:
            return False
        except OSError as exc:
            if exc.errno not in _DAMAGED:
                raise
            logs.get().warning("the file of a blob cannot be read", digest=digest, error=str(exc))
            return False

    @override
    def delete(self, digest: str) -> None:
        with files.translate_os_errors(f"removing the blob {digest}"), self._delete_duration.time():
            erase(self.path(digest))
        self._copies.discard(digest)

    @override
    def remove_orphans(self, stored: StoredDigests) -> Orphans:
        orphans = self.list_sizes().keys() - stored.referenced
        unknown = orphans - stored.given_up
        for digest in orphans:
            with crash_points.step("blob.remove_orphan"):
                if digest in unknown:
                    self._set_aside(self.path(digest))
                else:
                    self.delete(digest)
        return Orphans(len(orphans) - len(unknown), len(unknown))

    def _set_aside(self, path: Path) -> None:
        """Set a blob aside. Seeds of noise are erased at once, as privacy promises, also those that a crash left."""
        with files.translate_os_errors(f"setting {path} aside"):
            with path.open("rb") as file:
                is_secret = noise.has_seeds(file.read(files.BEGINNING_BYTES))
            erase(path) if is_secret else files.put_aside(path, self._folder)

    @override
    def take_back(self, digest: str) -> bool:
        target = self.path(digest)
        with files.translate_os_errors(f"taking back the blob {digest}"):
            try:
                durable.make_folder(target.parent)
                os.replace(self._folder / files.SET_ASIDE_FOLDER / digest, target)
            except FileNotFoundError:
                return False
            durable.sync(target.parent)
        return True

    @override
    def expire(self) -> None:
        files.expire_set_aside(self._folder, erase)

    @override
    def sweep(
        self, digests: Collection[str], older_than_s: float, unsettled: UnsettledBlobs, *, aside: bool = False
    ) -> int:
        size_bytes, until = 0, time.time() - older_than_s
        for digest in sorted(digests):
            path = self.path(digest)
            with files.translate_os_errors(f"removing {path}"), temporary(self._folder) as removed, unsettled.lock:
                if unsettled.is_kept(digest) or not path.is_file() or path.stat().st_mtime > until:
                    continue
                size_bytes += path.stat().st_size
                with crash_points.step("retention.remove"):
                    self._set_aside(path) if aside else os.replace(path, removed)
                self._copies.discard(digest)
        return size_bytes


def write_draft(path: Path, content: bytes) -> None:
    """Write a new file without a sync."""
    descriptor = durable.create(path)
    try:
        durable.write_all(descriptor, content)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def temporary(folder: Path) -> Generator[Path]:
    """Yield a path for a file in a folder; remove what the block leaves there."""
    path = folder / f"{uuid.uuid4().hex}{TEMPORARY}"
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            erase(path)


def remove_temporary(folder: Path) -> None:
    """Remove temporary files that a crash left."""
    with files.translate_os_errors("removing temporary files"):
        for path in folder.glob(f"*{TEMPORARY}"):
            if _TEMPORARY_NAME.fullmatch(path.name):  # the folder of --blobs may have others
                erase(path)


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
def remove_on_error(path: Path) -> Generator[None]:
    """Remove a file if the block fails."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            erase(path)
        raise
