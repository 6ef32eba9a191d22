"""Checks of the files that the database references: the blobs of versions, deltas and optimizer states, and updates.

They block: run them in a thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from fedplat.rounds import AssignmentId
from fedplat.rounds.invariants.records import Location
from fedplat_server.storage import blob_objects, files, ownership, set_aside, spool_names
from fedplat_server.storage.blob_stores import BlobPlace
from fedplat_server.storage.object_store import ObjectStore
from fedplat_server.verify.records import Finding

LOST_BLOB = (
    "If the models are in another place, name it with --blobs. Otherwise copy the file back from a backup of the "
    "blobs; without it this version is lost."
)
LOST_UPDATE = "Restart the daemon: it abandons the attempt and repeats the round. Then check the disk."
Progress = Callable[[int, int], None]
"""A callback with the number of bytes read so far and in total."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReferencedFiles:
    """A blob with a reference in the database; `size_bytes` is None if its size is unknown."""

    place: Location
    what: str
    size_bytes: int | None


@dataclasses.dataclass(frozen=True)
class DataFolder:
    """The folder of blobs: sizes by digest, and files that are not blobs."""

    sizes: Mapping[str, int]
    unknown: tuple[Path, ...]


class StoredBlobs(Protocol):
    """The blobs that are checked."""

    @abstractmethod
    def list(self) -> DataFolder:
        """Return what is there."""

    @abstractmethod
    def check(self, digest: str, needed: ReferencedFiles) -> tuple[str, str] | None:
        """Return what was found and what was expected, or None if a blob is correct."""


class FolderBlobs(StoredBlobs):
    """The blobs in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def list(self) -> DataFolder:
        return list_blobs(self._folder)

    @override
    def check(self, digest: str, needed: ReferencedFiles) -> tuple[str, str] | None:
        return _check_file(path_of(self._folder, digest), digest, needed)


class ObjectBlobs(StoredBlobs):
    """The blobs in an object store: they are read from there, not from the local copies."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    @override
    def list(self) -> DataFolder:
        return DataFolder(
            {digest: stored.size_bytes for digest, stored in blob_objects.list_objects(self._objects)}, ()
        )

    @override
    def check(self, digest: str, needed: ReferencedFiles) -> tuple[str, str] | None:
        if not files.is_digest(digest):
            return f"is named {digest[:100]!r}", "a SHA-256 in hexadecimal digits"
        name = blob_objects.name_of(digest)
        if (stored := self._objects.head(name)) is None:
            return "is not there", f"the object {self._objects.url}/{name}"
        if needed.size_bytes is not None and stored.size_bytes != needed.size_bytes:
            return f"has {stored.size_bytes} bytes", f"{needed.size_bytes} bytes"
        found = hashlib.sha256()
        for part in self._objects.read_parts(name, stored.size_bytes):
            found.update(part)
        if found.hexdigest() == digest:
            return None
        return f"has the digest {found.hexdigest()}", f"{digest}, the digest of its name"


def stored_blobs(place: BlobPlace) -> StoredBlobs:
    """Return the blobs at a place. Raises `ConfigError`."""
    return ObjectBlobs(place.open_objects()) if place.is_remote else FolderBlobs(place.folder)


def list_blobs(folder: Path) -> DataFolder:
    """Return the files in the folder, without those that are removed meanwhile."""
    sizes: dict[str, int] = {}
    unknown: list[Path] = []
    with files.translate_os_errors(f"listing {folder}"):
        for path in files.list_files(folder):
            try:
                size_bytes = path.stat().st_size
            except FileNotFoundError:
                continue
            if path == path_of(folder, path.name) and files.is_digest(path.name):
                sizes[path.name] = size_bytes
            elif path != folder / ownership.NAME and path.relative_to(folder).parts[0] != set_aside.FOLDER:
                unknown.append(path.relative_to(folder))
    return DataFolder(sizes, tuple(unknown))


def path_of(folder: Path, digest: str) -> Path:
    """Return the path of a blob."""
    return folder / digest[:2] / digest[2:4] / digest


def blobs(
    stored: StoredBlobs, needed: Mapping[str, ReferencedFiles], progress: Progress
) -> Iterator[tuple[str, Finding]]:
    """Check I2: every referenced blob exists with its size and the digest of its name. Yields findings by digest."""
    total = sum(reference.size_bytes or 0 for reference in needed.values())
    done = 0
    for digest, reference in needed.items():
        problem = stored.check(digest, reference)
        if problem is not None:
            found, expected = problem
            yield digest, Finding("I2", "blobs", reference.place, f"{reference.what} {found}", expected, LOST_BLOB)
        done += reference.size_bytes or 0
        progress(done, total)


def check_spool(folder: Path, needed: Mapping[AssignmentId, str]) -> Iterator[tuple[AssignmentId, Finding]]:
    """Check I3: every acknowledged update that is not merged yet is in the spool, with the reported digest."""
    for key, digest in needed.items():
        place = Location(*key.attempt, key.client_id)
        problem = _check_file(
            spool_names.path_of(folder, key, digest), digest, ReferencedFiles(place, "its update", None)
        )
        if problem is not None:
            yield key, Finding("I3", "spooled", place, f"its update {problem[0]}", problem[1], LOST_UPDATE)


def _check_file(path: Path, digest: str, needed: ReferencedFiles) -> tuple[str, str] | None:
    """Return what was found and what was expected, or None if the file is correct."""
    if not files.is_digest(digest):
        return f"is named {digest[:100]!r}", "a SHA-256 in hexadecimal digits"
    try:
        if not path.is_file():
            return "is not there", f"the file {path}"
        size_bytes = path.stat().st_size
        if needed.size_bytes is not None and size_bytes != needed.size_bytes:
            return f"has {size_bytes} bytes in {path}", f"{needed.size_bytes} bytes"
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        return f"cannot be read ({exc.strerror})", f"a readable file {path}"
    return (f"has the digest {found}", f"{digest}, the digest of its name") if found != digest else None
