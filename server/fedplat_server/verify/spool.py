"""The files that must or may be in the spool according to the rows, compared with the folder of uploads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from fedplat.rounds import AssignmentId, AttemptKey
from fedplat.rounds.invariants import attempts
from fedplat.rounds.invariants.records import StoredAttempt, StoredJob
from fedplat.rounds.states import AssignmentState, AttemptKind
from fedplat_server.storage import files
from fedplat_server.storage.spool import path_of
from fedplat_server.verify.records import Unit

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
        if isinstance(unit, StoredAttempt) and self._kept and unit.row.kind == AttemptKind.TRAIN:
            for row in unit.made if unit.row.is_open else attempts.still_open(unit):
                key = AssignmentId(AttemptKey(unit.row.job_id, unit.row.round, unit.row.number), row.client_id)
                self.expected.add(key)
                if row.state == AssignmentState.REPORTED:
                    self.reported[key] = row.digest

    def notes(self, folder: Path, found: list[Path]) -> Iterator[str]:
        """Yield notes on unexpected files among `found`, the files in the folder before the rows were read."""
        paths = [path for path in found if (folder / path).exists()]
        unknown = [path for path in paths if not _UPLOAD.fullmatch(path.as_posix())]
        expected = {path_of(folder, key, "").relative_to(folder).as_posix() for key in self.expected}
        num_left = sum(path.as_posix().partition("-")[0] + "-" not in expected for path in paths if path not in unknown)
        if num_left:
            yield (
                f"{num_left} uploads belong to no open assignment; "
                "they are removed with the attempt, or by the next start of the daemon"
            )
        yield from (f"the file {path} in {folder} is not an upload" for path in unknown)


def list_files(folder: Path) -> list[Path]:
    """Return the files in the folder of uploads, relative to it."""
    with files.translate_os_errors(f"listing {folder}"):
        return [path.relative_to(folder) for path in files.list_files(folder)]
