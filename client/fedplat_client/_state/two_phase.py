"""Files that count only once the update that they belong to was merged, in a folder of limited size.

Each job has up to two of them. The *settled* one belongs to updates that the server has merged. The *pending* one,
which is on the disk before its update is reported, becomes the settled one if that update was merged, and is thrown
away if it was not: the training is done again then, and what came of it would count twice. A receipt does not tell,
since the attempt may still be abandoned. So the client asks when it works for the job the next time: then the attempt
has ended, and the same report again is answered with the receipt only if the update was merged.

Crashes lose nothing, at whichever point: until the server has answered, both files are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from fedplat import durable
from fedplat_client._state import lru

_logger = logging.getLogger(__name__)


class SentReport(msgspec.Struct, frozen=True):
    """A report, by which the server is asked what became of it."""

    token: str
    digest: str


WasMerged = Callable[[SentReport], bool]
"""Tells whether a reported update was merged."""


class _Head(msgspec.Struct, frozen=True):
    """The first line of a file: what it is of, with which report it came, and the SHA-256 of the bytes behind it.

    `format` says what the bytes mean; under another one they mean nothing.
    """

    format: str
    sha256: str
    sent: SentReport


class TwoPhaseFiles:
    """A folder with the files of all jobs, of at most `limit_bytes`. Methods raise `OSError`.

    The files of the job that was worked for longest ago go first. `name` is what the log calls one of them.
    """

    def __init__(self, folder: Path, limit_bytes: int, name: str) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._name = name

    def commit(self, job_id: str, format: str, merged: WasMerged) -> bytes | None:
        """What counts for a job now, or None."""
        settled, pending = self._paths(job_id)
        if (waiting := self._merge_pending(pending, format, merged)) is not None:
            pending.replace(settled)
            return waiting
        pending.unlink(missing_ok=True)
        kept = self._read(settled, format)
        if kept is None:
            settled.unlink(missing_ok=True)
            return None
        os.utime(settled)  # the order of eviction
        return kept[1]

    def peek(self, job_id: str, format: str, merged: WasMerged) -> bytes | None:
        """The same, for work beside the training: the attempt may be open yet, so that nothing is settled."""
        settled, pending = self._paths(job_id)
        if (waiting := self._merge_pending(pending, format, merged)) is not None:
            return waiting
        kept = self._read(settled, format)
        return None if kept is None else kept[1]

    def stage(self, job_id: str, format: str, sent: SentReport, data: bytes | memoryview) -> bool:
        """Stores what came of an update before it is reported; False if it is beyond the limit."""
        settled, pending = self._paths(job_id)
        both = 2 * (memoryview(data).nbytes + 1000)
        if not lru.make_room(self._folder, both, self._limit_bytes, [settled.stem], self._log_eviction):
            return False
        head = _Head(format, hashlib.sha256(data).hexdigest(), sent)
        with durable.atomic_write(pending) as file:
            file.write(msgspec.json.encode(head) + b"\n")
            file.write(data)
        return True

    def forget(self, job_id: str) -> None:
        """Throws a job's files away; where that fails, they are tried once more the next time."""
        with contextlib.suppress(OSError):
            for path in self._paths(job_id):
                path.unlink(missing_ok=True)

    def _merge_pending(self, pending: Path, format: str, merged: WasMerged) -> bytes | None:
        waiting = self._read(pending, format)
        return waiting[1] if waiting is not None and merged(waiting[0].sent) else None

    def _read(self, path: Path, format: str) -> tuple[_Head, bytes] | None:
        """None if there is no file, or one of something else, or a damaged one."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError), path.open("rb") as file:
            head = msgspec.json.decode(file.readline(2000), type=_Head)
            data = file.read()
            if head.format == format and hashlib.sha256(data).hexdigest() == head.sha256:
                return head, data
            _logger.info("%s is of no use any more.", self._name, extra={"file": path.name})
        return None

    def _paths(self, job_id: str) -> tuple[Path, Path]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256(job_id.encode()).hexdigest()  # a name of a file, whatever the server calls its jobs
        return self._folder / f"{name}.settled", self._folder / f"{name}.pending"

    def _log_eviction(self, path: Path, size_bytes: int) -> None:
        _logger.info("%s was evicted.", self._name, extra={"file": path.name, "size_bytes": size_bytes})
