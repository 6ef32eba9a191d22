"""Helpers for blobs and uploads: errors of the disk, early writeback, digests."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Callable, Generator
from pathlib import Path

from fedplat_server.errors import BlobError, BlobFullError
from fedplat_server.instruments.full_writes import Place, note_full

READ_BYTES = 1 << 20
WRITEBACK_BYTES = 8 << 20
"""The number of new bytes of a file after which the kernel is told to start writing them to the disk."""
_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Return whether a text is a SHA-256 in lowercase hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


@contextlib.contextmanager
def translate_os_errors(doing: str, place: Place = "models") -> Generator[None]:
    """Translate errors of the operating system to `BlobFullError` or `BlobError`."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _FULL:
            raise BlobError(f"{doing} failed: {exc}") from exc
        note_full(place)
        raise BlobFullError(f"{doing} failed: {exc}") from exc


def list_files(folder: Path) -> list[Path]:
    """Return the files in a folder and those below it, sorted, without those that are removed meanwhile."""

    def raise_unless_removed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    found = [Path(where, name) for where, _, names in os.walk(folder, onerror=raise_unless_removed) for name in names]
    return sorted(path for path in found if path.is_file())


def find_digests(folder: Path, *patterns: str) -> frozenset[str]:
    """Return the names that are digests, or hashes of names, among the files and folders that match the patterns."""
    with translate_os_errors(f"listing {folder}"):
        return frozenset(path.name for each in patterns for path in folder.glob(each) if is_digest(path.name))


class Writeback:
    """The writeback of a growing file: the kernel writes to the disk early, which shortens the final sync.

    Six concurrent uploads of 100 MB, hashed and synced, took 0.46 s instead of 0.66 s. It guarantees nothing: the sync
    reports errors. On other systems than Linux, and for files in memory, it has no effect.
    """

    def __init__(self) -> None:
        self._started_bytes = 0

    def on_written(self, descriptor: int, size_bytes: int) -> None:
        """Start the writeback of new bytes if it is worthwhile. Called after each write, with the size of the file."""
        if size_bytes >= self._started_bytes + WRITEBACK_BYTES:
            if _sync_file_range is not None:
                start = self._started_bytes
                _sync_file_range(descriptor, start, size_bytes - start, _SYNC_FILE_RANGE_WRITE)
            self._started_bytes = size_bytes


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _find_sync_file_range()
