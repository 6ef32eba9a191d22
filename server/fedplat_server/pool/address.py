"""Where a pool is reached: a socket in the data folder, which nobody but the server's own user may open."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

_NAME = "pool.sock"


def of_folder(data_dir: Path) -> Path:
    """The socket of the pool of a data folder."""
    return data_dir / _NAME


@contextlib.contextmanager
def short(path: Path) -> Generator[str]:
    """A name of a socket that the kernel takes: at most 107 bytes, where a folder's path may have more."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
