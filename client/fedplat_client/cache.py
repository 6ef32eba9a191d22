"""The model cache: committed models by the digest of their content, verified, limited in size."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from pathlib import Path

from fedplat_client.errors import TransferError
from fedplat_client.identity import sync_folder

_DIGEST = re.compile(r"[0-9a-f]{64}")
_logger = logging.getLogger(__name__)


class ModelCache:
    """A folder with one file per model, `<digest>.safetensors`, and one `<digest>.part` per unfinished download.

    One model is in use at a time: the one that was last asked for. It is never evicted; of the others, the one
    that was used longest ago goes first. Methods raise `OSError` when the disk fails them.
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

    def part(self, digest: str) -> Path:
        """Where the download of a model goes; what is there already is the beginning of the model."""
        return self._path(digest, "part")

    def make_room(self, digest: str, size_bytes: int) -> None:
        """Evicts other models and other unfinished downloads until `size_bytes` fit into the limit."""
        others = [path for path in self._folder.iterdir() if path.stem != digest]
        used = sorted((path.stat().st_mtime_ns, path.stat().st_size, path) for path in others)
        excess = sum(size for _, size, _ in used) + size_bytes - self._limit_bytes
        for _, size, path in used:
            if excess <= 0:
                return
            path.unlink()
            excess -= size
            _logger.info("A model was evicted from the cache.", extra={"file": path.name, "size_bytes": size})

    def admit(self, digest: str) -> Path:
        """Makes a finished download a model of the cache.

        Raises `TransferError`, and deletes the download, when its content has another digest.
        """
        part = self.part(digest)
        if (found := _digest_of(part)) != digest:
            part.unlink()
            raise TransferError(
                f"the downloaded model has the digest {found}; expected {digest}. It was deleted; "
                "the next attempt downloads it anew"
            )
        with part.open("rb") as file:
            os.fsync(file.fileno())
        path = self._path(digest, "safetensors")
        part.replace(path)
        sync_folder(self._folder)
        return path

    def _path(self, digest: str, suffix: str) -> Path:
        if not _DIGEST.fullmatch(digest):  # it becomes the name of a file
            raise TransferError(f"the server names a model {digest!r}; expected 64 hexadecimal digits in lower case")
        return self._folder / f"{digest}.{suffix}"


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
