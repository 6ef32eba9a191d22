"""The model cache: models by the digest of their content, in a folder of limited size, the least recently used go.

A version that a job downloads is written over the file of one that the job no longer needs, since writing to pages
that the system has in memory costs less than new ones.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import mmap
import os
import re
import shutil
import struct
import weakref
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from fedplat import forks, system
from fedplat.model import Parameters
from fedplat.wire import digests, messages
from fedplat_client.errors import TransferError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 1 << 20
_MARK = struct.Struct("<8sQ")
_MARK_NAME = b"received"
"""The mark at the end of a recycled file, in which old bytes follow the received ones: this name, and their number."""
_logger = logging.getLogger(__name__)


class PartialDownload:
    """An unfinished download: its file, and the number and the hash of its bytes so far. Close it after use.

    The file grows with the download, or has its final size already if it is a recycled one.
    """

    def __init__(self, path: Path, give_way: GiveWay, kind: str = "") -> None:
        """`kind` is that of the digest (`fedplat.wire.digests`)."""
        self.path = path
        self.size = 0
        self._give_way = give_way
        self._hash = digests.UpdateHash(kind)
        path.touch()
        self._file = path.open("r+b", buffering=0)
        num_received, self._mark_at = _read_mark(self._file.fileno())
        while self.size < num_received and (read := self._file.read(min(_READ_BYTES, num_received - self.size))):
            self._count(read)  # bytes from an earlier process

    @property
    def digest(self) -> str:
        """The digest of the content so far."""
        return self._hash.digest

    def write(self, data: messages.Bytes) -> None:
        """Append bytes, and hash them now, while they are in the processor's cache."""
        rest = memoryview(data)
        while rest:
            rest = rest[write_bounded(functools.partial(self._file.write, rest), self._give_way) :]
        self._count(data)
        if (start := self._mark_at) is not None:  # after the bytes, which a process that is killed here receives again
            write_bounded(lambda: _write_mark(self._file.fileno(), start, self.size), self._give_way)

    def restart(self) -> None:
        """Delete the content."""
        self._file.truncate(0)
        self._file.seek(0)
        self.size, self._mark_at = 0, None
        self._hash = digests.UpdateHash(self._hash.kind)

    def finish(self) -> None:
        """Cut off what follows the received bytes in a recycled file."""
        self._file.truncate(self.size)

    def close(self) -> None:
        """Close the file; its content is kept."""
        self._file.close()

    def _count(self, data: messages.Bytes) -> None:
        self._hash.update(data)
        self.size += len(data)


@dataclass(eq=False)
class _UsedVersion:
    """A version that this process has mapped for a job. Its file must not change while a map of it exists."""

    digest: str
    num_forks: int
    maps: list[weakref.ref[mmap.mmap]]

    @property
    def is_mapped(self) -> bool:
        """True if there is a map, or may be one in a child that was forked since the first one was made."""
        return forks.count() > self.num_forks or any(each() is not None for each in self.maps)


class ModelCache:
    """A folder with one file per model, `<digest>.safetensors`, and one `<digest>.part` per unfinished download.

    One model is in use at a time: the last one requested, and also its base while it is built from a delta. These are
    never evicted; of the others, the least recently used is evicted first. A model larger than the limit is not kept
    (`fedplat_client._work.transfer`). Methods raise `OSError` if the disk fails.

    The limit is an upper bound: on a disk with less space, files are evicted so that a new model fits, and `give_way`
    is for what else the client has to write. Without `evicts` only `make_room` deletes files.
    """

    def __init__(self, folder: Path, limit_bytes: int, *, evicts: bool = True) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._evicts = evicts
        self._in_use: tuple[str, ...] = ()
        self._used: dict[str, list[_UsedVersion]] = {}  # by job, the last one used for the first time at the end
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def find(self, digest: str) -> Path | None:
        """Return the model's file after verifying it, or None if the cache does not have it. Deletes a damaged file."""
        path = self._path(digest, "safetensors")
        try:
            if _digest_of(path) != digest:
                _logger.warning("A cached model is damaged and is downloaded again.", extra={"digest": digest})
                path.unlink()
                return None
            os.utime(path)  # eviction orders by modification time, since access times are often disabled
        except FileNotFoundError:  # perhaps taken at this moment: a silo moves the files of its neighbours away
            return None
        self._in_use = (digest,)
        return path

    def note_use(self, job_id: str, digest: str, *models: Parameters) -> None:
        """Note that a job uses a version, with the models that map its file."""
        self._used = {
            job: found
            for job, versions in self._used.items()
            if (found := [each for each in versions if self._path(each.digest, "safetensors").exists()])
        }
        versions = self._used.setdefault(job_id, [])
        version = next((each for each in versions if each.digest == digest), None)
        if version is None:
            version = _UsedVersion(digest, forks.count(), [])
            versions.append(version)
        maps = [found for model in models if (found := _find_map(model)) is not None]
        version.maps = [each for each in version.maps if each() is not None] + [weakref.ref(each) for each in maps]

    def recycle(self, job_id: str, digest: str, size_bytes: int, *needed: str) -> None:
        """Make the file of an older version of a job that of its next download, which overwrites it.

        Not if the download has begun already, and not a version that is `needed`, used by another job, or mapped. The
        file has the same size, and no second name, such as in a copy of the folder with hard links.
        """
        part = self._path(digest, "part")
        if part.exists():
            return
        others = {each.digest for job, versions in self._used.items() if job != job_id for each in versions}
        for version in self._used.get(job_id, ()):
            path = self._path(version.digest, "safetensors")
            if version.digest in {digest, *needed} | others or version.is_mapped:
                continue
            with contextlib.suppress(OSError):  # for example evicted, or made read-only
                if _mark_recycled(path, size_bytes):
                    path.replace(part)
                    return

    @contextlib.contextmanager
    def part(self, digest: str, checked: str = "") -> Generator[PartialDownload]:
        """Open the partial download of a model; it may already contain the beginning.

        `checked` is the digest by which `admit` will check it, if that is another one.
        """
        kind = digests.kind_of(checked)
        part = PartialDownload(self._path(digest, "part"), lambda: self.give_way(digest), kind)
        try:
            yield part
        finally:
            part.close()

    def make_room(self, size_bytes: int, *digests: str) -> bool:
        """Evict other files until `size_bytes`, the total size for these digests, fits; return False if it cannot."""
        self._in_use = digests
        return make_room(self._folder, size_bytes, self._limit_bytes, digests, _log_eviction)

    def give_way(self, *digests: str) -> bool:
        """Evict one file that is neither in use nor among `digests`; return False if there is no such file."""
        return self._evicts and evict_one(self._folder, (*self._in_use, *digests), _log_eviction)

    def admit(self, part: PartialDownload, digest: str, checked: str = "") -> Path:
        """Turn a finished download into a model of the cache.

        The file is not synced: `find` detects damage from a power failure. Raises `TransferError`, and deletes the
        download, if its content has another digest than this one, or than `checked` if that is not empty.
        """
        self.check(part, checked or digest)
        part.finish()
        return part.path.replace(self._path(digest, "safetensors"))

    def check(self, part: PartialDownload, digest: str) -> None:
        """Raise `TransferError`, and delete a finished download, if its content has another digest."""
        if part.digest != digest:
            part.path.unlink()
            raise TransferError(
                f"the downloaded file has the digest {part.digest}; expected {digest}. It was deleted; "
                "the next attempt downloads it again"
            )

    def _path(self, digest: str, suffix: str) -> Path:
        if not _DIGEST.fullmatch(digest):  # it becomes a file name
            raise TransferError(f"the server sent the digest {digest!r}; expected 64 lower-case hexadecimal digits")
        return self._folder / f"{digest}.{suffix}"


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_map(model: Parameters) -> mmap.mmap | None:
    """Return the map that a model is in, which lives as long as any array or tensor with the model's memory."""
    owner: Any = model.buffer
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return owner if isinstance(owner, mmap.mmap) else None


def _mark_recycled(path: Path, size_bytes: int) -> bool:
    """Mark a model's file as one of which nothing was received; return False if it is not suitable."""
    descriptor = os.open(path, os.O_WRONLY | system.O_BINARY | system.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        is_suitable = found.st_size == size_bytes and found.st_nlink == 1
        if is_suitable:
            _write_mark(descriptor, size_bytes, 0)
        return is_suitable
    finally:
        os.close(descriptor)


def _write_mark(descriptor: int, start: int, num_received: int) -> None:
    system.pwrite(descriptor, _MARK.pack(_MARK_NAME, num_received), start)


def _read_mark(descriptor: int) -> tuple[int, int | None]:
    """Return the number of received bytes of an unfinished download, and the position of the mark if it has one."""
    size = os.fstat(descriptor).st_size
    start = size - _MARK.size
    if start >= 0:
        name, num_received = _MARK.unpack(system.pread(descriptor, _MARK.size, start))
        if name == _MARK_NAME and num_received <= start:
            return num_received, start
    return size, None


def _log_eviction(path: Path, size_bytes: int) -> None:
    _logger.info("Evicted a model from the cache.", extra={"file": path.name, "size_bytes": size_bytes})


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_RESERVE_BYTES = 64 * 2**20
_RESERVE_SHARE = 0.05
"""What evicted files leave free for others: 64 MiB, but at most this share of a small disk."""
GiveWay: TypeAlias = Callable[[], bool]
"""Deletes a file that is not needed, so that a full disk has room; returns False if there is no such file."""
Result = TypeVar("Result")


def make_room(
    folder: Path, size_bytes: int, limit_bytes: int, spared: Collection[str], evicted: Callable[[Path, int], None]
) -> bool:
    """Delete the least recently used files until `size_bytes` fit into the limit, and on the disk.

    Return False if they cannot fit into the limit. `size_bytes` counts all files with a stem in `spared`; these are not
    deleted. `evicted` is called with each deleted file and its size. Raises `OSError`.
    """
    files = [(path.stat().st_mtime_ns, path.stat().st_size, path) for path in folder.iterdir()]
    used = sorted(each for each in files if each[2].stem not in spared)
    num_there = sum(size for _, size, path in files if path.stem in spared)
    excess = sum(size for _, size, _ in used) + size_bytes - limit_bytes
    lacking = size_bytes - num_there - free_bytes(folder)
    for _, size, path in used:
        if max(excess, lacking) <= 0:
            break
        if system.delete(path):
            excess -= size
            lacking -= size
            evicted(path, size)
    return excess <= 0


def free_bytes(folder: Path) -> int:
    """Return how many bytes a folder's disk has for files that can be evicted."""
    disk = shutil.disk_usage(folder)
    return disk.free - min(_RESERVE_BYTES, int(_RESERVE_SHARE * disk.total))


def evict_one(folder: Path, spared: Collection[str], evicted: Callable[[Path, int], None]) -> bool:
    """Delete the least recently used file; return False if there are only `spared` ones. Raises `OSError`."""
    used = sorted((path.stat().st_mtime_ns, path) for path in folder.iterdir() if path.stem not in spared)
    for _, path in used:
        size = path.stat().st_size
        if system.delete(path):
            evicted(path, size)
            return True
    return False


def write_bounded(action: Callable[[], Result], give_way: GiveWay) -> Result:
    """Return the result of an action that writes; repeat it while the disk is full and something gives way to it.

    `make_room` cannot foresee everything: other programs write, too, and users have quotas. Raises `OSError`.
    """
    while True:
        try:
            return action()
        except OSError as exc:
            if exc.errno not in _FULL or not give_way():
                raise
