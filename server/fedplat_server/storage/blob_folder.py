"""Blobs in a folder: `folder/aa/bb/<sha256>`, where aa and bb are the first digits of the digest.

A blob is synced, renamed, and its folder is synced.

Before a file is removed its beginning is overwritten, since the numbers at the beginning of a rule's state may include
seeds of noise. Other copies of a file system (journals, snapshots, spare blocks) are out of reach.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Collection, Generator, Iterable, Mapping
from pathlib import Path

from typing_extensions import override

from fedplat import durable
from fedplat.privacy import noise
from fedplat_server import crash_points
from fedplat_server.errors import BlobError
from fedplat_server.instruments import Instruments
from fedplat_server.storage import files, ownership, set_aside
from fedplat_server.storage.blob_backend import BlobBackend, Orphans, StoredDigests, UnsettledBlobs
from fedplat_server.storage.ownership import Contents, Owner

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
        raise BlobError(f"{digest[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
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
        return self.path(digest).is_file()

    @override
    def size(self, digest: str) -> int:
        with files.translate_os_errors(f"reading the blob {digest}"):
            return self.path(digest).stat().st_size

    @override
    def list_sizes(self) -> Mapping[str, int]:
        sizes: dict[str, int] = {}
        with files.translate_os_errors("listing the blobs"):
            for path in self._folder.glob("??/??/*"):
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
                folder.mkdir(parents=True, exist_ok=True)
                durable.sync(self._folder)
                durable.sync(folder.parent)
            self._synced.add(folder)
        # An existing blob with this digest is replaced: its entry in the folder might not be durable.
        with self._rename_duration.time():
            with crash_points.step("blob.rename"), unsettled.lock:
                unsettled.add(digest)
                os.replace(source, target)
            with remove_on_error(target), crash_points.step("blob.folder_sync"):
                durable.sync(folder)

    @override
    def delete(self, digest: str) -> None:
        with files.translate_os_errors(f"removing the blob {digest}"), self._delete_duration.time():
            erase(self.path(digest))

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
                is_secret = noise.has_seeds(file.read(set_aside.BEGINNING_BYTES))
            erase(path) if is_secret else set_aside.put(path, self._folder)

    @override
    def take_back(self, digest: str) -> bool:
        target = self.path(digest)
        with files.translate_os_errors(f"taking back the blob {digest}"):
            try:
                durable.make_folder(target.parent)
                os.replace(self._folder / set_aside.FOLDER / digest, target)
            except FileNotFoundError:
                return False
            durable.sync(target.parent)
        return True

    @override
    def expire(self) -> None:
        set_aside.expire(self._folder, erase)

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
        return size_bytes


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
