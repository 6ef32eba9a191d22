"""Opening of files that a stranger may have written: those of a dataset, or of a run folder."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

from fedplat.errors import DataError


def open_regular(path: Path, expected: str = "a file of a packed dataset: restore it") -> io.BufferedReader:
    """Open a file for reading. Raises `DataError` if it is not a regular file, `FileNotFoundError` and `OSError`."""
    # O_NONBLOCK: a plain open of a FIFO waits for its writer. For a regular file it changes nothing.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DataError(f"{path} is not a regular file; expected {expected}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
