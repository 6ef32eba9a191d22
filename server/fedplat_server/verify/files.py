"""Checks of the files that the database references: blobs, and the updates that must or may be in the spool.

They block: run them in a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from fedplat import extras
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.invariants import attempts, records
from fedplat.rounds.states import AssignmentState
from fedplat.wire import digests
from fedplat_server.errors import BlobError
from fedplat_server.storage import (
    blob_objects,
    blob_stores,
    files,
    object_store,
    ownership,
    segments,
    spool_backend,
    spool_file,
)
from fedplat_server.storage.spool_file import name_attempt, name_update, spool_path_of
from fedplat_server.verify.checks import Finding, Unit

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

    place: records.Location
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
        if not files.is_digest(digest):
            return _describe_name(digest)
        return _check_file(path_of(self._folder, digest), digest, needed)


class ObjectBlobs(StoredBlobs):
    """The blobs in an object store: they are read from there, not from the local copies."""

    def __init__(self, objects: object_store.ObjectStore) -> None:
        self._objects = objects

    @override
    def list(self) -> DataFolder:
        return DataFolder(
            {digest: stored.size_bytes for digest, stored in blob_objects.list_objects(self._objects)}, ()
        )

    @override
    def check(self, digest: str, needed: ReferencedFiles) -> tuple[str, str] | None:
        if not files.is_digest(digest):
            return _describe_name(digest)
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


def stored_blobs(place: blob_stores.BlobPlace) -> StoredBlobs:
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
            elif path != folder / ownership.NAME and path.relative_to(folder).parts[0] != files.SET_ASIDE_FOLDER:
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
        place = records.Location(*key.attempt, key.client_id)
        problem = _check_file(
            spool_file.spool_path_of(folder, key, digest), digest, ReferencedFiles(place, "its update", None)
        )
        if problem is not None:
            yield key, Finding("I3", "spooled", place, f"its update {problem[0]}", problem[1], LOST_UPDATE)


def _check_file(path: Path, digest: str, needed: ReferencedFiles) -> tuple[str, str] | None:
    """Return what was found and what was expected, or None if the file is correct."""
    if not digests.is_digest(digest):
        return _describe_name(digest)
    if (kind := digests.kind_of(digest)) and not digests.has_blake3():
        return "cannot be checked without BLAKE3", extras.install_command("blake3", "fedplat-server")
    try:
        if not path.is_file():
            return "is not there", f"the file {path}"
        size_bytes = path.stat().st_size
        if needed.size_bytes is not None and size_bytes != needed.size_bytes:
            return f"has {size_bytes} bytes in {path}", f"{needed.size_bytes} bytes"
        found = digests.hash_file(path, kind)
    except OSError as exc:
        return f"cannot be read ({exc.strerror})", f"a readable file {path}"
    return (f"has the digest {found}", f"{digest}, the digest of its name") if found != digest else None


def _describe_name(digest: str) -> tuple[str, str]:
    return f"is named {digest[:100]!r}", "a SHA-256 in hexadecimal digits"


_MAX_BYTES = 1 << 40
"""Nothing larger is read; the parts of a copy are not kept in memory."""
_UPLOAD = re.compile("[0-9a-f]{64}/[0-9a-f]{64}-(?:b3:)?(?:[0-9a-f]{64}|[0-9a-f]{32})")
"""The path of an upload: the attempt, the client, and the digest; or an id before the report."""


@dataclasses.dataclass
class ExpectedUpdates:
    """The files of the spool according to the rows of all units. A job must be added before its attempts.

    `reported` are the digests of updates that must exist: those that were accepted for an open attempt or the next one,
    of jobs with `durability = "spool"`. `expected` are all assignments whose uploads may exist, complete or not.
    """

    reported: dict[AssignmentId, str] = dataclasses.field(default_factory=dict[AssignmentId, str])
    expected: set[AssignmentId] = dataclasses.field(default_factory=set[AssignmentId])
    _kept: bool = False

    def add(self, unit: Unit) -> None:
        """Add the files of an attempt. Other units have no files."""
        if isinstance(unit, records.StoredJob):
            self._kept = unit.spec is not None and unit.spec.durability == "spool"
        if isinstance(unit, records.StoredAttempt) and self._kept and unit.protocol.folds:
            for row in unit.made if unit.row.is_open else attempts.still_open(unit):
                key = AssignmentId(AttemptKey(unit.row.job_id, unit.row.round, unit.row.number), row.client_id)
                self.expected.add(key)
                if row.state == AssignmentState.REPORTED:
                    self.reported[key] = row.digest


class SpoolPlace(Protocol):
    """Where durable updates are. Methods block, and raise `BlobError` if the place cannot be listed."""

    def list_updates(self) -> None:
        """List what is there, before the rows are read."""

    def check(self, needed: Mapping[AssignmentId, str]) -> Iterator[tuple[AssignmentId, Finding]]:
        """Check I3: every acknowledged update that is not merged yet is there, with the reported digest."""
        ...

    def notes(self, expected: ExpectedUpdates) -> Iterator[str]:
        """Yield notes on what was listed, is still there and is not expected."""
        ...


def open_place(data_dir: Path, spool: str) -> SpoolPlace:
    """Return the place of the option `--spool`: a folder, the default one (""), or the URL of an object store."""
    if "://" in spool:
        return SpoolObjects(object_store.ObjectStore(spool))
    return SpoolFolder((Path(spool) if spool else data_dir) / "uploads")


class SpoolFolder(SpoolPlace):
    """The folder of uploads, and that of segments beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments = folder.with_name(segments.FOLDER)
        self._listed: Sequence[Path] = ()
        self._listed_segments: Mapping[Path, Sequence[segments.Record]] = {}

    @override
    def list_updates(self) -> None:
        with files.translate_os_errors(f"listing {self._folder}"):
            self._listed = [path.relative_to(self._folder) for path in files.list_files(self._folder)]
            self._listed = [path for path in self._listed if path.parts[0] != files.SET_ASIDE_FOLDER]
            self._listed_segments = self._read_segments()

    @override
    def check(self, needed: Mapping[AssignmentId, str]) -> Iterator[tuple[AssignmentId, Finding]]:
        with files.translate_os_errors(f"reading {self._segments}"):
            records = [each for found in self._read_segments().values() for each in found]
        damaged: dict[tuple[str, str], segments.Record] = {}
        intact: set[tuple[str, str]] = set()
        names = {(name_update(key), digest) for key, digest in needed.items()}
        for record in records:
            name = record.update, record.digest
            if name in names and _is_intact(record):
                intact.add(name)
            elif name in names:
                damaged[name] = record
        rest = {key: digest for key, digest in needed.items() if (name_update(key), digest) not in intact}
        for key, finding in check_spool(self._folder, rest):
            record = damaged.get((name_update(key), needed[key]))
            if record is not None:
                found, expected = f"its update is damaged in {record.part.path}", f"bytes with the digest {needed[key]}"
                finding = dataclasses.replace(finding, found=found, expected=expected)
            yield key, finding

    def _read_segments(self) -> Mapping[Path, Sequence[segments.Record]]:
        """Return the records of the segments that are not empty. Raises `OSError`."""
        found: dict[Path, Sequence[segments.Record]] = {}
        for path in segments.list_segments(self._segments):
            with contextlib.suppress(FileNotFoundError):  # a daemon has just removed it
                if records := list(segments.read_records(path)):
                    found[path] = records
        return found

    @override
    def notes(self, expected: ExpectedUpdates) -> Iterator[str]:
        folder = self._folder
        updates = {name_update(key) for key in expected.expected}
        with files.translate_os_errors(f"reading {self._segments}"):
            num_idle = sum(
                path in self._listed_segments and updates.isdisjoint(each.update for each in records)
                for path, records in self._read_segments().items()
            )
        if num_idle:
            yield (
                f"{num_idle} segments have no update of an open assignment; "
                "they are emptied with the attempt, or removed by the next start of the daemon"
            )
        paths = [path for path in self._listed if (folder / path).exists()]
        unknown = [path for path in paths if not _UPLOAD.fullmatch(path.as_posix())]
        names = {spool_path_of(folder, key, "").relative_to(folder).as_posix() for key in expected.expected}
        num_left = sum(path.as_posix().partition("-")[0] + "-" not in names for path in paths if path not in unknown)
        if num_left:
            yield (
                f"{num_left} uploads belong to no open assignment; "
                "they are removed with the attempt, or by the next start of the daemon"
            )
        yield from (f"the file {path} in {folder} is not an upload" for path in unknown)


def _is_intact(record: segments.Record) -> bool:
    try:
        return record.is_intact()
    except OSError:
        return False


class SpoolObjects(SpoolPlace):
    """The copies of updates in an object store."""

    def __init__(self, store: object_store.ObjectStore) -> None:
        self._store = store
        self._listed: frozenset[spool_backend.ObjectName] = frozenset()

    @override
    def list_updates(self) -> None:
        self._listed = frozenset(spool_backend.list_names(self._store))

    @override
    def check(self, needed: Mapping[AssignmentId, str]) -> Iterator[tuple[AssignmentId, Finding]]:
        # Listed again: the rows may need what was stored after the first time. The same bytes may be there twice.
        names = {(name.attempt, name.update, name.digest): name for name in spool_backend.list_names(self._store)}
        for key, digest in needed.items():
            name = names.get((name_attempt(key.attempt), name_update(key), digest))
            problem = "is not there" if name is None else self._check_copy(name)
            if problem:
                expected = f"a copy with the digest {digest} in {self._store.url}"
                place = records.Location(*key.attempt, key.client_id)
                yield key, Finding("I3", "spooled", place, f"its update {problem}", expected, LOST_UPDATE)

    @override
    def notes(self, expected: ExpectedUpdates) -> Iterator[str]:
        known = {(name_attempt(key.attempt), name_update(key)) for key in expected.expected}
        left = [name for name in self._listed if (name.attempt, name.update) not in known]
        if left and (num_left := len(self._listed.intersection(left, spool_backend.list_names(self._store)))):
            yield (
                f"{num_left} copies of updates in {self._store.url} belong to no open assignment; "
                "they are removed with the attempt, or by the next start of the daemon"
            )

    def _check_copy(self, name: spool_backend.ObjectName) -> str:
        """Return what is wrong with a copy, or ""."""
        try:
            found = spool_file.new_hash(name.digest)
            for part in self._store.read_parts(str(name), _MAX_BYTES):
                found.update(part)
        except BlobError as exc:
            return f"cannot be read ({exc})"
        return "" if found.digest == name.digest else f"has the digest {found.digest} in {name}"
