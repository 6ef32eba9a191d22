"""Files that become valid only when their update is merged, and the attempts for which a client has sent keys.

Each job has up to two files. The *settled* file belongs to merged updates. The *pending* file is on the disk before its
update is reported. It replaces the settled file if the update was merged. It is deleted if not: the training is then
repeated, and its effect would count twice. A receipt does not decide this, since the attempt may still be abandoned. So
the client queries the server when it next works for the job: by then the attempt has ended, and repeating the report
returns a receipt only if the update was merged.

A crash at any point loses nothing: both files exist until the server has answered.

A lost control variate, or one kept although its update was not merged, would silently make the job's result wrong. So
an assignment fails if its client state cannot be stored.

A server that gave out an attempt again would get a second sum of the same clients' updates, under other masks.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from fedplat import durable, errors
from fedplat.client_state import ClientState
from fedplat.config.decoding import prepare_type
from fedplat.model import Parameters, Vector
from fedplat_client._state import model_cache

_logger = logging.getLogger(__name__)


class SentReport(msgspec.Struct, frozen=True):
    """The token and digest of a report, which the client sends again to learn whether it was merged."""

    token: str
    digest: str


WasMerged = Callable[[SentReport], bool]
"""Returns whether a reported update was merged."""


class _Head(msgspec.Struct, frozen=True):
    """Header line of a file: payload format, SHA-256 of the payload, and the report it belongs to.

    Files of another `format` are ignored.
    """

    format: str
    sha256: str
    sent: SentReport


class TwoPhaseFiles:
    """A folder with the files of all jobs, at most `limit_bytes` in size. Methods raise `OSError`.

    The files of the least recently used job are evicted first. `name` is the name of such a file in the log, and
    `give_way` frees space on a full disk.
    """

    def __init__(
        self, folder: Path, limit_bytes: int, name: str, give_way: model_cache.GiveWay = lambda: False
    ) -> None:
        self._folder = folder
        self._give_way = give_way
        self._limit_bytes = limit_bytes
        self._name = name

    def commit(self, job_id: str, format: str, merged: WasMerged) -> bytes | None:
        """Commit the pending file if its update was merged, else delete it; return the job's valid payload, or None."""
        settled, pending = self._paths(job_id)
        if (payload := self._read_merged(pending, format, merged)) is not None:
            pending.replace(settled)
            return payload
        pending.unlink(missing_ok=True)
        content = self._read(settled, format)
        if content is None:
            settled.unlink(missing_ok=True)
            return None
        os.utime(settled)  # eviction orders by modification time
        return content[1]

    def peek(self, job_id: str, format: str, merged: WasMerged) -> bytes | None:
        """Return what `commit` would, without changing files: during an evaluation the attempt may still be open."""
        settled, pending = self._paths(job_id)
        if (payload := self._read_merged(pending, format, merged)) is not None:
            return payload
        content = self._read(settled, format)
        return None if content is None else content[1]

    def stage(self, job_id: str, format: str, sent: SentReport, data: bytes | memoryview) -> bool:
        """Store the payload of an update before it is reported; return False if it exceeds the limit."""
        settled, pending = self._paths(job_id)
        both = 2 * (memoryview(data).nbytes + 1000)
        if not model_cache.make_room(self._folder, both, self._limit_bytes, [settled.stem], self._log_eviction):
            return False
        head = _Head(format, hashlib.sha256(data).hexdigest(), sent)

        def write() -> None:
            with durable.atomic_write(pending) as file:
                file.write(msgspec.json.encode(head) + b"\n")
                file.write(data)

        model_cache.write_bounded(write, self._give_way)
        return True

    def forget(self, job_id: str) -> None:
        """Delete a job's files; if that fails, they are used once more the next time."""
        with contextlib.suppress(OSError):
            for path in self._paths(job_id):
                path.unlink(missing_ok=True)

    def _read_merged(self, pending: Path, format: str, merged: WasMerged) -> bytes | None:
        content = self._read(pending, format)
        return content[1] if content is not None and merged(content[0].sent) else None

    def _read(self, path: Path, format: str) -> tuple[_Head, bytes] | None:
        """Return header and payload; None if there is no file, or it has another format or is damaged."""
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError), path.open("rb") as file:
            head = msgspec.json.decode(file.readline(2000), type=prepare_type(_Head))
            data = file.read()
            if head.format == format and hashlib.sha256(data).hexdigest() == head.sha256:
                return head, data
            _logger.info("%s cannot be used any more.", self._name, extra={"file": path.name})
        return None

    def _paths(self, job_id: str) -> tuple[Path, Path]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = hashlib.sha256(job_id.encode()).hexdigest()  # a valid file name for any job id
        return self._folder / f"{name}.settled", self._folder / f"{name}.pending"

    def _log_eviction(self, path: Path, size_bytes: int) -> None:
        _logger.info("%s was evicted.", self._name, extra={"file": path.name, "size_bytes": size_bytes})


_FORMAT = "memory"


class ClientStateStore:
    """A folder with the client states of all jobs, at most `limit_bytes` in size."""

    def __init__(self, folder: Path, limit_bytes: int, give_way: model_cache.GiveWay = lambda: False) -> None:
        self._files = TwoPhaseFiles(folder, limit_bytes, "A client state", give_way)

    def open(self, job_id: str, merged: WasMerged, *, training: bool) -> ClientState:
        """Return the client state of a job. An evaluation reads the state without changing the files."""
        try:
            read = self._files.commit if training else self._files.peek
            data = read(job_id, _FORMAT, merged)
            return ClientState({} if data is None else _unpack_notes(Parameters.from_bytes(data)))
        except (OSError, errors.ModelError) as exc:  # most trainers have no state; for the others `stage` fails, too
            _logger.warning("The client state of the job cannot be read: %s", exc, extra={"job": job_id})
            return ClientState()

    def stage(self, job_id: str, sent: SentReport, client_state: ClientState) -> bool:
        """Store the client state before the update is reported; return False if it exceeds the limit.

        If the trainer changed nothing, the stored state stays valid. Raises `OSError`.
        """
        if not client_state.changed:
            return True
        return self._files.stage(job_id, _FORMAT, sent, _pack_notes(client_state.contents).to_bytes())


def _pack_notes(notes: Mapping[str, Parameters]) -> Parameters:
    """Pack all notes into one file with tensors named NOTE/TENSOR; a note's name contains no slash."""
    arrays: dict[str, npt.NDArray[Any]] = {
        f"{note}/{name}": array for note, values in notes.items() for name, array in values.items()
    }
    return Parameters.from_arrays(arrays)


def _unpack_notes(packed: Parameters) -> dict[str, Parameters]:
    notes: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for key, array in packed.items():
        note, _, name = key.partition("/")
        notes.setdefault(note, {})[name] = array
    return {note: Parameters.from_arrays(arrays) for note, arrays in notes.items()}


class Residuals:
    """A folder with the residuals of all jobs, at most `limit_bytes` in size. Methods raise `OSError`."""

    def __init__(self, folder: Path, limit_bytes: int, give_way: model_cache.GiveWay = lambda: False) -> None:
        self._files = TwoPhaseFiles(folder, limit_bytes, "A residual", give_way)
        self.forget = self._files.forget

    def load(self, job_id: str, format: str, size: int, merged: WasMerged) -> Vector | None:
        """Return the residual of a job, float32 [size], or None; `format` identifies the job's codec and schema."""
        data = self._files.commit(job_id, f"{format} {size}", merged)
        if data is None or len(data) != 4 * size:
            return None
        return np.frombuffer(data, "<f4").astype(np.float32, copy=False)

    def stage(self, job_id: str, format: str, sent: SentReport, residual: Vector) -> bool:
        """Store the residual of an update before it is reported; return False if it exceeds the limit."""
        data = residual.astype("<f4", copy=False).data.cast("B")
        return self._files.stage(job_id, f"{format} {residual.size}", sent, data)


MAX_ATTEMPTS = 10_000
"""Number of attempts that are remembered, the latest ones."""
_DIGEST_BYTES = 16


class ServedAttempts:
    """A file with a digest of each attempt, in the order in which the client took part. Methods raise `OSError`.

    The server's name is that of the folder. Attempts are not compared by their numbers, since those of a server that
    was restored from a backup begin again at an earlier one.
    """

    def __init__(self, path: Path, limit: int = MAX_ATTEMPTS) -> None:
        self._path = path
        self._limit = limit

    def is_new(self, job_id: str, round: int, number: int) -> bool:
        """Return whether an attempt was not added yet."""
        return _digest(job_id, round, number) not in self._read()

    def add(self, job_id: str, round: int, number: int) -> bool:
        """Store an attempt durably; return False if it was there before."""
        digests, added = self._read(), _digest(job_id, round, number)
        if added in digests:
            return False
        durable.write_bytes(self._path, b"".join([*digests, added][-self._limit :]))
        return True

    def _read(self) -> list[bytes]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        return [content[begin : begin + _DIGEST_BYTES] for begin in range(0, len(content), _DIGEST_BYTES)]


def _digest(job_id: str, round: int, number: int) -> bytes:
    return hashlib.sha256(f"{round} {number} {job_id}".encode()).digest()[:_DIGEST_BYTES]
