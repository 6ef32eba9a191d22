"""Which files must be in the spool and which may be, by the rows; compared with the folder of uploads."""

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
    """The files of the spool by the rows of all units; a job must be added before its attempts.

    `reported` are the digests of updates that must be there: accepted, for an attempt that has not ended or for the
    next one, and to be kept. `expected` are all whose uploads may be there, complete or not.
    """

    reported: dict[AssignmentId, str] = dataclasses.field(default_factory=dict[AssignmentId, str])
    expected: set[AssignmentId] = dataclasses.field(default_factory=set[AssignmentId])
    _kept: bool = False

    def add(self, unit: Unit) -> None:
        """Add the files of an attempt. Other units have none."""
        if isinstance(unit, StoredJob):
            self._kept = unit.spec is not None and unit.spec.durability == "spool"
        if isinstance(unit, StoredAttempt) and self._kept and unit.row.kind == AttemptKind.TRAIN:
            for one in unit.made if unit.row.is_open else attempts.still_open(unit):
                key = AssignmentId(AttemptKey(unit.row.job_id, unit.row.round, unit.row.number), one.client_id)
                self.expected.add(key)
                if one.state == AssignmentState.REPORTED:
                    self.reported[key] = one.digest

    def notes(self, folder: Path, found: list[Path]) -> Iterator[str]:
        """Yield notes on unexpected files, of those that were in the folder before the rows were read."""
        still = [path for path in found if (folder / path).exists()]
        unknown = [path for path in still if not _UPLOAD.fullmatch(path.as_posix())]
        expected = {path_of(folder, key, "").relative_to(folder).as_posix() for key in self.expected}
        left = sum(path.as_posix().partition("-")[0] + "-" not in expected for path in still if path not in unknown)
        if left:
            yield (
                f"{left} uploads belong to no open assignment; "
                "they go with the attempt, or with the next start of the daemon"
            )
        yield from (f"the file {path} in {folder} is no upload" for path in unknown)


def list_files(folder: Path) -> list[Path]:
    """Return the files in the folder of uploads, relative to it."""
    with files.translate_os_errors(f"listing {folder}"):
        return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
