"""The state of a silo in each decentralised job: its model, what it has announced, and what its neighbours sent.

```
<data_dir>/.../silos/<job>/state.json       what the silo has done, and which files it needs
                           <digest>         files, named by their SHA-256
                           fetched/         files of peers that are not complete yet
```
A file is durable before the state names it, and the state is replaced atomically. So a crash at any point leaves the
silo before a step or after it, and a step that is repeated computes the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from fedplat import durable
from fedplat.decoding import prepare_type
from fedplat.gossip.messages import Delta, Digest, Number, SiloName, Size
from fedplat.model import Parameters

_STATE = "state.json"
_FETCHED = "fetched"
_logger = logging.getLogger(__name__)


class PendingMean(Struct, frozen=True):
    """The mean of an attempt at a ring that the silo has, and its distance from the silo's model."""

    round: Number
    attempt: Number
    digest: Digest
    squared_distance: float
    chunks: tuple[str, ...]


class RelaySecret(Struct, frozen=True):
    """The private key of the silo for files through the server in one attempt."""

    round: Number
    attempt: Number
    secret: bytes

    def __repr__(self) -> str:
        return f"RelaySecret(round={self.round}, attempt={self.attempt})"


class SiloState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a silo has done in a job, and the digests of its files.

    `model` is the file of its model (`fedplat.gossip.files`) and `carried` that of the model's other entries. With a
    codec `copy` is the public copy that neighbours have, and `delta` the step to it. `is_trained`: the model was
    trained and is not mixed yet; `prepared` is the round for which the model (or the copy) was made ready to announce.
    `trained_token` is the token of the assignment in which the model was trained last. `stored` are the files of
    neighbours in that round, by their ids. `assignment` is one that is not over, and `relay` the key for its relay.
    `sent_bytes` and `received_bytes` are those of models since the beginning; `announced_bytes` until `prepared`, and
    `round_bytes` those between the last two.
    """

    mixed_round: Number = 0
    adopted_round: Number = 0
    is_trained: bool = False
    trained_token: str = ""
    num_examples: float = 1.0
    metrics: dict[str, float] = {}
    initial: str = ""
    model: str = ""
    carried: str = ""
    copy: str = ""
    delta: Delta | None = None
    prepared: Number = 0
    followers: tuple[SiloName, ...] | None = None
    stored: dict[str, str] = {}
    mean: PendingMean | None = None
    sent_bytes: Annotated[int, Meta(ge=0)] = 0
    received_bytes: Annotated[int, Meta(ge=0)] = 0
    announced_bytes: tuple[Size, Size] = (0, 0)
    round_bytes: tuple[Size, Size] = (0, 0)
    assignment: bytes = b""
    relay: RelaySecret | None = None

    @property
    def digests(self) -> set[str]:
        """The files that the silo needs."""
        delta = self.delta.digest if self.delta is not None else ""
        mean = self.mean.digest if self.mean is not None else ""
        return {self.initial, self.model, self.carried, self.copy, delta, mean, *self.stored.values()} - {""}


class SiloFolder:
    """The folder of one job. Methods raise `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fetched = path / _FETCHED
        self.fetched.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.state = self._load()

    def find(self, digest: str) -> Path | None:
        """Return the path of a file; None if it is missing."""
        path = self.path / digest
        return path if path.is_file() else None

    def put(self, content: Parameters | bytes) -> str:
        """Store a file durably, and return its digest."""
        pieces = content.pieces if isinstance(content, Parameters) else (memoryview(content),)
        sha256 = hashlib.sha256()
        for piece in pieces:
            sha256.update(piece)
        digest = sha256.hexdigest()
        if self.find(digest) is None:
            with durable.atomic_write(self.path / digest) as file:
                for piece in pieces:
                    file.write(piece)
        return digest

    def admit(self, path: Path, digest: str) -> Path:
        """Move a verified file of a peer here, durably."""
        durable.sync(path)
        target = path.replace(self.path / digest)
        durable.sync(self.path)
        return target

    def save(self, state: SiloState) -> SiloState:
        """Store a state, whose files are there, and return it."""
        durable.write_bytes(self.path / _STATE, msgspec.json.encode(state))
        self.state = state
        return state

    def keep_only(self, *digests: str) -> None:
        """Delete the files that neither the state nor `digests` name."""
        kept = {*self.state.digests, *digests, _STATE, _FETCHED}
        for path in self.path.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def _load(self) -> SiloState:
        """Return the stored state; a new one if there is none, or if it or one of its files is damaged."""
        state = read_state(self.path)
        if state is None:
            return SiloState()
        if damaged := sorted(digest for digest in state.digests if not self._is_intact(digest)):
            _logger.warning("The silo's files are damaged, and begin again.", extra={"first": damaged[0]})
            return SiloState()
        return state

    def _is_intact(self, digest: str) -> bool:
        path = self.find(digest)
        if path is None:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest


def read_state(folder: Path) -> SiloState | None:
    """Return the state in a folder; None if there is none, or if it is damaged."""
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=prepare_type(SiloState))
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as exc:
        _logger.warning("The silo's state cannot be read, and begins again: %s", exc)
        return None


class SiloStore:
    """The folders of all jobs; those of jobs that were not used for longest are deleted beyond `limit_bytes`."""

    def __init__(self, folder: Path, exports: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._exports = exports
        self._limit_bytes = limit_bytes
        self._last: SiloFolder | None = None

    def open(self, job_id: str) -> SiloFolder:
        """Return the folder of a job, and make room for it. Its files are verified when a process first opens it."""
        path = self._folder / _name(job_id)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(path)  # eviction orders by modification time
        self._make_room(path)
        if self._last is None or self._last.path != path:
            self._last = SiloFolder(path)
        return self._last

    def find_unfinished(self) -> list[bytes]:
        """Return the assignments that were not over when the client ended."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        states = [read_state(path) for path in sorted(self._folder.iterdir())]
        return [state.assignment for state in states if state is not None and state.assignment]

    def export(self, job_id: str, model: Path) -> Path:
        """Store the mean that a job exports, durably, and return its path."""
        self._exports.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = self._exports / f"{_safe(job_id)}.safetensors"
        with model.open("rb") as source, durable.atomic_write(target) as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return target

    def _make_room(self, spared: Path) -> None:
        used = {path: _measure(path) for path in self._folder.iterdir() if path.is_dir()}
        excess = sum(used.values()) - self._limit_bytes
        for path in sorted(used, key=lambda each: each.stat().st_mtime_ns):
            if excess <= 0:
                return
            if path != spared:
                shutil.rmtree(path)
                excess -= used[path]
                _logger.info("The state of a decentralised job was evicted.", extra={"file": path.name})


def _name(job_id: str) -> str:
    return hashlib.sha256(job_id.encode()).hexdigest()[:32]  # a valid name for any job id


def _safe(job_id: str) -> str:
    """Return a job id as a file name: as it is if it is one of a server."""
    is_plain = job_id.replace("-", "").isalnum() and len(job_id) <= 100
    return job_id if is_plain and job_id.isascii() else _name(job_id)


def _measure(path: Path) -> int:
    total = 0
    for each in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += each.stat().st_size
    return total
