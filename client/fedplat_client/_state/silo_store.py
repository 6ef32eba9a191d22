"""The state of a silo in each decentralised job: its model, what it has announced, and what its neighbours sent.

```
silos/<job>/state.json       what the silo has done, and which files it needs
            <digest>         these files, named by their SHA-256
            received/        files of other silos that are not complete or not verified yet
```
A file is durable before the state names it, and the state is replaced atomically. So a crash at any point leaves the
silo before a step or after it, and a step that is repeated computes the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from fedplat import durable
from fedplat.config.decoding import prepare_type
from fedplat.gossip.messages import Delta, Digest, Number
from fedplat.model import Parameters
from fedplat_client._state import model_cache

_STATE = "state.json"
_RECEIVED = "received"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_JOB_ID = re.compile(r"[A-Za-z0-9-]{1,100}")
_COPY_BYTES = 1 << 20
KEEP_S = 3 * 86_400.0
"""The time for which the files of a silo that begins again are kept beside the folders of jobs."""
_logger = logging.getLogger(__name__)
NumBytes = Annotated[int, Meta(ge=0)]


def is_digest(text: str) -> bool:
    """Return whether a text is a SHA-256, which may become the name of a file."""
    return _DIGEST.fullmatch(text) is not None


class PendingMean(Struct, frozen=True):
    """The mean of an attempt at a ring that the silo has, and its distance from the silo's model."""

    round: Number
    attempt: Number
    digest: Digest
    squared_distance: float
    chunks: tuple[str, ...]


class RelaySecret(Struct, frozen=True):
    """The private key of one assignment for files through the server, without which a restarted silo gets none."""

    round: Number
    attempt: Number
    secret: bytes


class SiloState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a silo has done in a job, and the digests of its files.

    `model` is the file of its model (`fedplat.gossip.mixing`) and `carried` that of the entries that are not averaged.
    `is_trained`: the model was trained and not mixed since, in the training with the id `training`. `prepared` is the
    round for which the model was made ready for neighbours: with a codec, `copy` is then the public copy and `delta`
    the step to it, which the silos `followers` can use (None: all can). `stored` are the files of neighbours in that
    round, by their ids, and `mixed_with` those in the last row. `assignment` is the last one, until its round is over.
    Pairs of numbers are the bytes sent and received: in all, in all before the last announcement, and what that one
    says.
    """

    mixed_round: Number = 0
    adopted_round: Number = 0
    is_trained: bool = False
    training: str = ""
    num_examples: float = 1.0
    metrics: dict[str, float] = {}
    model: str = ""
    carried: str = ""
    copy: str = ""
    delta: Delta | None = None
    followers: tuple[str, ...] | None = None
    prepared: Number = 0
    stored: dict[str, str] = {}
    mixed_with: dict[str, str] = {}
    mean: PendingMean | None = None
    relay: RelaySecret | None = None
    assignment: bytes = b""
    num_bytes: tuple[NumBytes, NumBytes] = (0, 0)
    announced_bytes: tuple[NumBytes, NumBytes] = (0, 0)
    said_bytes: tuple[NumBytes, NumBytes] = (0, 0)

    @property
    def own_files(self) -> set[str]:
        """The digests of the files without which the silo has to begin again."""
        delta = self.delta.digest if self.delta is not None else ""
        return {self.model, self.carried, self.copy, delta} - {""}

    @property
    def files(self) -> set[str]:
        """The digests of all files that the silo needs."""
        mean = {self.mean.digest} if self.mean is not None else set[str]()
        return self.own_files.union(self.stored.values(), self.mixed_with.values(), mean)


class SiloFolder:
    """The folder of one job. Methods raise `OSError`."""

    def __init__(self, path: Path, give_way: model_cache.GiveWay = lambda: False) -> None:
        self.path = path
        self._give_way = give_way
        self.received = path / _RECEIVED
        self.received.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.state = self._load()

    def find(self, digest: str) -> Path | None:
        """Return the path of a file; None if it is missing. A server may name any text, such as another path."""
        path = self.path / digest
        return path if is_digest(digest) and path.is_file() else None

    def put(self, content: Parameters | bytes) -> str:
        """Store a file durably, and return its digest."""
        pieces = content.pieces if isinstance(content, Parameters) else (memoryview(content),)
        sha256 = hashlib.sha256()
        for piece in pieces:
            sha256.update(piece)
        digest = sha256.hexdigest()

        def write() -> None:
            with durable.atomic_write(self.path / digest) as file:
                for piece in pieces:
                    file.write(piece)

        if self.find(digest) is None:
            model_cache.write_bounded(write, self._give_way)
        return digest

    def admit(self, path: Path, digest: str) -> Path:
        """Move a verified file of another silo here, durably; return its path."""
        if path.parent == self.path:
            return path
        durable.sync(path)
        target = path.replace(self.path / digest)
        durable.sync(self.path)
        return target

    def save(self, state: SiloState) -> None:
        """Store a state, whose files are there."""
        durable.write_bytes(self.path / _STATE, msgspec.json.encode(state))
        self.state = state

    def discard(self, path: Path) -> None:
        """Delete a file of another silo that must not be used, unless it is also one of this silo."""
        if path.parent != self.path:
            path.unlink(missing_ok=True)

    def tidy(self, *digests: str) -> None:
        """Delete the files that neither the state nor `digests` name, and what has been received besides."""
        kept = {*self.state.files, *digests, _STATE, _RECEIVED}
        for path in self.path.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)
        for path in self.received.iterdir():
            path.unlink(missing_ok=True)

    def _load(self) -> SiloState:
        """Return the stored state without the files of others that are damaged; a new one if its own ones are."""
        state = _read_state(self.path)
        if state is None:
            return self._begin_again()
        damaged = {digest for digest in state.files if not self._is_intact(digest)}
        for digest in damaged:
            _logger.warning("A file of a silo is missing or damaged.", extra={"digest": digest})
        if damaged & state.own_files:
            return self._begin_again()
        for digest in damaged:
            (self.path / digest).unlink(missing_ok=True)
        return msgspec.structs.replace(
            state,
            stored={name: digest for name, digest in state.stored.items() if digest not in damaged},
            mixed_with={name: digest for name, digest in state.mixed_with.items() if digest not in damaged},
            mean=state.mean if state.mean is not None and state.mean.digest not in damaged else None,
        )

    def _begin_again(self) -> SiloState:
        """Return a new state; what is here stays for days beside the folders of jobs, since it may be the only copy."""
        left = [path for path in self.path.iterdir() if path != self.received]
        if left:
            aside = _aside_of(self.path.parent) / f"{self.path.name}.{uuid.uuid4().hex[:8]}"
            aside.mkdir(mode=0o700, parents=True)
            for path in left:
                path.replace(aside / path.name)
            _logger.warning("The former files of a silo are in %s for %d days.", aside, KEEP_S // 86_400)
        return SiloState()

    def _is_intact(self, digest: str) -> bool:
        path = self.find(digest)
        if path is None:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest


def _read_state(folder: Path) -> SiloState | None:
    """Return the state in a folder; None if no state can be read."""
    try:
        return msgspec.json.decode((folder / _STATE).read_bytes(), type=prepare_type(SiloState))
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        _logger.warning("The state of a silo cannot be read, so the silo begins again: %s", exc)
        return None


class SiloStore:
    """The folders of all jobs; beyond `limit_bytes`, those of the jobs that were not used for longest are deleted."""

    def __init__(
        self, folder: Path, exports: Path, limit_bytes: int, give_way: model_cache.GiveWay = lambda: False
    ) -> None:
        self._folder = folder
        self._give_way = give_way
        self._exports = exports
        self._limit_bytes = limit_bytes
        self._last: SiloFolder | None = None

    def open(self, job_id: str) -> SiloFolder:
        """Return the folder of a job, and make room for it. Its files are verified when a process first opens it."""
        path = self._folder / _file_name(job_id)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.utime(path)  # eviction orders by modification time
        self._make_room(path)
        self._expire()
        if self._last is None or self._last.path != path:
            self._last = SiloFolder(path, self._give_way)
        return self._last

    def _expire(self) -> None:
        """Delete what was set aside long enough ago."""
        until = time.time() - KEEP_S
        for path in _aside_of(self._folder).glob("*"):
            if path.stat().st_mtime <= until:
                shutil.rmtree(path)

    def find_unfinished(self) -> list[bytes]:
        """Return the assignments that were not over when the client ended."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        states = [_read_state(path) for path in sorted(self._folder.iterdir())]
        return [state.assignment for state in states if state is not None and state.assignment]

    def export(self, job_id: str, model: Path) -> Path:
        """Store the mean that a job exports, durably, and return its path."""
        self._exports.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = self._exports / f"{_file_name(job_id)}.safetensors"
        with model.open("rb") as source, durable.atomic_write(target) as file:
            shutil.copyfileobj(source, file, _COPY_BYTES)
        return target

    def _make_room(self, spared: Path) -> None:
        others = [path for path in self._folder.iterdir() if path.is_dir() and path != spared]
        used = sorted((path.stat().st_mtime_ns, path, sum(_file_sizes(path))) for path in others)
        excess = sum(size for _, _, size in used) + sum(_file_sizes(spared)) - self._limit_bytes
        for _, path, size in used:
            if excess <= 0:
                return
            shutil.rmtree(path)
            excess -= size
            _logger.info("The state of a decentralised job was evicted.", extra={"job": path.name, "size_bytes": size})


def _aside_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-set-aside")


def _file_name(job_id: str) -> str:
    """Return a job's id as a name of a file: its hash unless it is like those of servers."""
    return job_id if _JOB_ID.fullmatch(job_id) else hashlib.sha256(job_id.encode()).hexdigest()


def _file_sizes(path: Path) -> Iterator[int]:
    for each in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if each.is_file():
                yield each.stat().st_size
