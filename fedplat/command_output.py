"""What all commands do if their output cannot be written."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Generator
from typing import TextIO, cast

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)


@contextlib.contextmanager
def checked_output(prefix: str) -> Generator[None]:
    """Flush stdout at the end of the block; end the process with one line on stderr if stdout cannot be written.

    The line begins with `prefix`, and the exit status is 1. There is no line if the reader has closed the pipe.
    """
    stream = cast(TextIO | None, sys.stdout)  # None if the caller has closed it
    try:
        try:
            yield
        finally:
            if stream is not None:
                stream.flush()
    except OSError as exc:
        if stream is None or exc.errno not in _UNWRITABLE or exc.filename is not None:
            raise
        if exc.errno != errno.EPIPE:  # else the reader has seen enough
            sys.stderr.write(f"{prefix}: the output cannot be written: {exc.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python flushes it once more
        sys.exit(1)
