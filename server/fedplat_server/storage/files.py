"""What blobs and uploads share: errors of the disk, early writeback, digests."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import re
import threading
from collections.abc import Callable, Generator

from fedplat_server.errors import BlobError, BlobFullError

READ_BYTES = 1 << 20
WRITEBACK_BYTES = 8 << 20
"""After so many new bytes of a file it pays to begin writing them to the disk."""
_SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether a text is a SHA-256 in lowercase hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


class _Counter:
    def __init__(self) -> None:
        self.count = 0
        self.lock = threading.Lock()


_full = _Counter()


def note_full() -> None:
    """Counts one more write that found no room."""
    with _full.lock:
        _full.count += 1


def num_full() -> int:
    """How often this process found no room to write: for models, for updates, in its database."""
    return _full.count


@contextlib.contextmanager
def translate_os_errors(doing: str) -> Generator[None]:
    """Turns errors of the operating system into `BlobFullError` or `BlobError`."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in _FULL:
            raise BlobError(f"{doing} failed: {exc}") from exc
        note_full()
        raise BlobFullError(f"{doing} failed: {exc}") from exc


class Writeback:
    """Lets the kernel write a file to the disk while it grows, so that the sync at its end has less to wait for.

    Six uploads of 100 MB at once, hashed and synced: 0.46 s instead of 0.66. Promises nothing: an error shows in the
    sync. Linux only, elsewhere the sync does it all; a file in memory has no disk to go to.
    """

    def __init__(self) -> None:
        self._begun = 0

    def on_written(self, descriptor: int, size_bytes: int) -> None:
        """To be told how large the file is now, each time that it was written to."""
        if size_bytes >= self._begun + WRITEBACK_BYTES:
            if _sync_file_range is not None:
                _sync_file_range(descriptor, self._begun, size_bytes - self._begun, _SYNC_FILE_RANGE_WRITE)
            self._begun = size_bytes


def _found_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync_file_range = _found_sync_file_range()
