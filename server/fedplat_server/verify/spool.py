"""The updates that must or may be in the spool according to the rows, compared with its folder or object store."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.invariants import attempts
from fedplat.rounds.invariants.records import Location, StoredAttempt, StoredJob
from fedplat.rounds.states import AssignmentState
from fedplat_server.errors import BlobError
from fedplat_server.storage import files, set_aside
from fedplat_server.storage.object_store import ObjectStore
from fedplat_server.storage.spool_backend import ObjectName, list_names
from fedplat_server.storage.spool_names import name_attempt, name_update, path_of
from fedplat_server.verify.files import LOST_UPDATE, check_spool
from fedplat_server.verify.records import Finding, Unit

_MAX_BYTES = 1 << 40
"""Nothing larger is read; the parts of a copy are not kept in memory."""
_UPLOAD = re.compile("[0-9a-f]{64}/[0-9a-f]{64}-[0-9a-f]{64}")


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
        if isinstance(unit, StoredJob):
            self._kept = unit.spec is not None and unit.spec.durability == "spool"
        if isinstance(unit, StoredAttempt) and self._kept and unit.protocol.folds:
            for row in unit.made if unit.row.is_open else attempts.still_open(unit):
                key = AssignmentId(AttemptKey(unit.row.job_id, unit.row.round, unit.row.number), row.client_id)
                self.expected.add(key)
                if row.state == AssignmentState.REPORTED:
                    self.reported[key] = row.digest


class SpoolPlace(Protocol):
    """Where durable updates are. Methods block, and raise `BlobError` if the place cannot be listed."""

    def list_updates(self) -> None:
        """List what is there, before the rows are read."""
        ...

    def check(self, needed: Mapping[AssignmentId, str]) -> Iterator[tuple[AssignmentId, Finding]]:
        """Check I3: every acknowledged update that is not merged yet is there, with the reported digest."""
        ...

    def notes(self, expected: ExpectedUpdates) -> Iterator[str]:
        """Yield notes on what was listed, is still there and is not expected."""
        ...


def open_place(data_dir: Path, spool: str) -> SpoolPlace:
    """Return the place of the option `--spool`: a folder, the default one (""), or the URL of an object store."""
    if "://" in spool:
        return SpoolObjects(ObjectStore(spool))
    return SpoolFolder((Path(spool) if spool else data_dir) / "uploads")


class SpoolFolder(SpoolPlace):
    """The folder of uploads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listed: Sequence[Path] = ()

    @override
    def list_updates(self) -> None:
        with files.translate_os_errors(f"listing {self._folder}"):
            self._listed = [path.relative_to(self._folder) for path in files.list_files(self._folder)]
            self._listed = [path for path in self._listed if path.parts[0] != set_aside.FOLDER]

    @override
    def check(self, needed: Mapping[AssignmentId, str]) -> Iterator[tuple[AssignmentId, Finding]]:
        return check_spool(self._folder, needed)

    @override
    def notes(self, expected: ExpectedUpdates) -> Iterator[str]:
        folder = self._folder
        paths = [path for path in self._listed if (folder / path).exists()]
        unknown = [path for path in paths if not _UPLOAD.fullmatch(path.as_posix())]
        names = {path_of(folder, key, "").relative_to(folder).as_posix() for key in expected.expected}
        num_left = sum(path.as_posix().partition("-")[0] + "-" not in names for path in paths if path not in unknown)
        if num_left:
            yield (
                f"{num_left} uploads belong to no open assignment; "
                "they are removed with the attempt, or by the next start of the daemon"
            )
        yield from (f"the file {path} in {folder} is not an upload" for path in unknown)


class SpoolObjects(SpoolPlace):
    """The copies of updates in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._listed: frozenset[ObjectName] = frozenset()

    @override
    def list_updates(self) -> None:
        self._listed = frozenset(list_names(self._store))

    @override
    def check(self, needed: Mapping[AssignmentId, str]) -> Iterator[tuple[AssignmentId, Finding]]:
        # Listed again: the rows may need what was stored after the first time. The same bytes may be there twice.
        names = {(name.attempt, name.update, name.digest): name for name in list_names(self._store)}
        for key, digest in needed.items():
            name = names.get((name_attempt(key.attempt), name_update(key), digest))
            problem = "is not there" if name is None else self._check_copy(name)
            if problem:
                expected = f"a copy with the digest {digest} in {self._store.url}"
                place = Location(*key.attempt, key.client_id)
                yield key, Finding("I3", "spooled", place, f"its update {problem}", expected, LOST_UPDATE)

    @override
    def notes(self, expected: ExpectedUpdates) -> Iterator[str]:
        known = {(name_attempt(key.attempt), name_update(key)) for key in expected.expected}
        left = [name for name in self._listed if (name.attempt, name.update) not in known]
        if left and (num_left := len(self._listed.intersection(left, list_names(self._store)))):
            yield (
                f"{num_left} copies of updates in {self._store.url} belong to no open assignment; "
                "they are removed with the attempt, or by the next start of the daemon"
            )

    def _check_copy(self, name: ObjectName) -> str:
        """Return what is wrong with a copy, or ""."""
        found = hashlib.sha256()
        try:
            for part in self._store.read_parts(str(name), _MAX_BYTES):
                found.update(part)
        except BlobError as exc:
            return f"cannot be read ({exc})"
        return "" if found.hexdigest() == name.digest else f"has the digest {found.hexdigest()} in {name}"
