"""What a codec has left out of a job's updates, kept in the client's data folder and added to the next one.

Each job has up to two residuals. The *settled* one belongs to updates that the server has merged. The *pending* one,
which is on the disk before its update is reported, becomes the settled one if that update was merged, and is thrown
away if it was not: the training is done again then, and what it would have left out would count twice. A receipt does
not tell, since the attempt may still be abandoned. So the client asks when it works for the job the next time: then
the attempt has ended, and the same report again is answered with the receipt only if the update was merged.

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
import numpy as np

from fedplat.model import Vector
from fedplat_client import eviction
from fedplat_client.identity import sync_folder

_logger = logging.getLogger(__name__)


class Sent(msgspec.Struct, frozen=True):
    """A report, by which the server is asked what became of it."""

    token: str
    digest: str


class _Head(msgspec.Struct, frozen=True):
    """The first line of a file: what the residual is of, of which report, and the SHA-256 of the numbers behind it.

    `format` names the job's codec and schema: under others the residual means nothing.
    """

    format: str
    sha256: str
    sent: Sent


class Residuals:
    """A folder with the residuals of all jobs, of at most `limit_bytes`. Methods raise `OSError`.

    The residuals of the job that was worked for longest ago go first.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes

    def settle(self, job_id: str, format: str, size: int, merged: Callable[[Sent], bool]) -> Vector | None:
        """The residual of a job, float32 [size], or None. `merged` tells whether a reported update was merged."""
        settled, pending = self._paths(job_id)
        waiting = _read(pending, format, size)
        if waiting is not None and merged(waiting[0].sent):
            pending.replace(settled)
            return waiting[1]
        pending.unlink(missing_ok=True)
        kept = _read(settled, format, size)
        if kept is None:
            settled.unlink(missing_ok=True)
            return None
        os.utime(settled)  # the order of eviction
        return kept[1]

    def keep(self, job_id: str, format: str, sent: Sent, residual: Vector) -> bool:
        """Stores what is left of an update before it is reported; False if it is beyond the limit."""
        settled, pending = self._paths(job_id)
        data = residual.astype("<f4", copy=False).data
        both = 2 * (residual.nbytes + 1000)
        if not eviction.make_room(self._folder, both, self._limit_bytes, [settled.stem], _log_eviction):
            return False
        head = _Head(format, hashlib.sha256(data).hexdigest(), sent)
        temporary = pending.with_suffix(".tmp")
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(head) + b"\n")
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(pending)
        sync_folder(self._folder)
        return True

    def forget(self, job_id: str) -> None:
        """Throws a job's residuals away; where that fails, they are tried once more the next time."""
        with contextlib.suppress(OSError):
            for path in self._paths(job_id):
                path.unlink(missing_ok=True)

    def _paths(self, job_id: str) -> tuple[Path, Path]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256(job_id.encode()).hexdigest()  # a name of a file, whatever the server calls its jobs
        return self._folder / f"{name}.settled", self._folder / f"{name}.pending"


def _read(path: Path, format: str, size: int) -> tuple[_Head, Vector] | None:
    """None if there is no file, or one of something else, or a damaged one."""
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError), path.open("rb") as file:
        head = msgspec.json.decode(file.readline(2000), type=_Head)
        data = file.read()
        if (head.format, len(data)) == (format, 4 * size) and hashlib.sha256(data).hexdigest() == head.sha256:
            return head, np.frombuffer(data, "<f4").astype(np.float32, copy=False)
        _logger.info("A residual is of no use any more.", extra={"file": path.name})
    return None


def _log_eviction(path: Path, size_bytes: int) -> None:
    _logger.info("A residual was evicted.", extra={"file": path.name, "size_bytes": size_bytes})
