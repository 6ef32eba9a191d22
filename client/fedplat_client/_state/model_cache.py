"""The model cache: committed models by the digest of their content, verified, limited in size."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Generator
from pathlib import Path

from fedplat.wire import pieces
from fedplat_client._state import lru
from fedplat_client.errors import TransferError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 1 << 20
_logger = logging.getLogger(__name__)


class PartialDownload:
    """A download that is not finished: a file that grows, and the hash of what is in it. Close it after use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._sha256 = hashlib.sha256()
        self._file = path.open("a+b", buffering=0)
        self._file.seek(0)
        while read := self._file.read(_READ_BYTES):  # what an earlier process has left
            self._note(read)

    @property
    def digest(self) -> str:
        """That of what is in it."""
        return self._sha256.hexdigest()

    def write(self, data: pieces.Bytes) -> None:
        """Appends bytes; hashes them now, while they are in the processor's cache."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._note(data)

    def restart(self) -> None:
        """Throws away what is in it."""
        self._file.truncate(0)
        self.size = 0
        self._sha256 = hashlib.sha256()

    def close(self) -> None:
        """Ends the writing; what is in it stays."""
        self._file.close()

    def _note(self, data: pieces.Bytes) -> None:
        self._sha256.update(data)
        self.size += len(data)


class ModelCache:
    """A folder with one file per model, `<digest>.safetensors`, and one `<digest>.part` per unfinished download.

    One model is in use at a time: the one that was last asked for, and while it is made from a delta, its base. They
    are never evicted; of the others, the one that was used longest ago goes first. A model that is larger than the
    limit is not kept (`models.py`). Methods raise `OSError` when the disk fails them.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def find(self, digest: str) -> Path | None:
        """The model's file, verified; None when the cache has none. A damaged file is deleted."""
        path = self._path(digest, "safetensors")
        if not path.exists():
            return None
        if _digest_of(path) != digest:
            _logger.warning("A cached model is damaged and is downloaded again.", extra={"digest": digest})
            path.unlink()
            return None
        os.utime(path)  # the order of eviction; access times are often switched off
        return path

    @contextlib.contextmanager
    def part(self, digest: str) -> Generator[PartialDownload]:
        """Where the download of a model goes; what is there already is the beginning of the model."""
        part = PartialDownload(self._path(digest, "part"))
        try:
            yield part
        finally:
            part.close()

    def make_room(self, size_bytes: int, *digests: str) -> bool:
        """Evicts other models and other unfinished downloads than these until `size_bytes`, for all of these, fit.

        False if that is beyond the limit.
        """
        return lru.make_room(self._folder, size_bytes, self._limit_bytes, digests, _log_eviction)

    def admit(self, part: PartialDownload, digest: str) -> Path:
        """Makes a finished download a model of the cache.

        It is not synced: `find` notices what a power failure may leave of it. Raises `TransferError`, and deletes the
        download, when its content has another digest.
        """
        self.check(part, digest)
        return part.path.replace(self._path(digest, "safetensors"))

    def check(self, part: PartialDownload, digest: str) -> None:
        """Raises `TransferError`, and deletes a finished download, when its content has another digest."""
        if part.digest != digest:
            part.path.unlink()
            raise TransferError(
                f"what was downloaded has the digest {part.digest}; expected {digest}. It was deleted; "
                "the next attempt downloads it anew"
            )

    def _path(self, digest: str, suffix: str) -> Path:
        if not _DIGEST.fullmatch(digest):  # it becomes the name of a file
            raise TransferError(f"the server names a model {digest!r}; expected 64 hexadecimal digits in lower case")
        return self._folder / f"{digest}.{suffix}"


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _log_eviction(path: Path, size_bytes: int) -> None:
    _logger.info("A model was evicted from the cache.", extra={"file": path.name, "size_bytes": size_bytes})
