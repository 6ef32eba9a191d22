"""The data folder, and the lock that says whose it is. The kernel lets go of it whatever happens to a process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path

from fedplat_server.errors import ConfigError


@contextlib.contextmanager
def held(folder: Path, *, shared: bool) -> Generator[None]:
    """Holds a data folder, which is made if need be: for this process alone, or with others of the same database.

    Raises `ConfigError` when another process holds it in a way that does not go with this.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"the data folder {folder} cannot be made: {exc.strerror}") from exc
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise ConfigError(f"the data folder {folder} cannot be written to: {exc.strerror}") from exc
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(
                f"another fedplat-server uses {folder}; stop it, or choose another folder with --data-dir. "
                "(Several daemons may share a folder if they share a PostgreSQL database: --database postgresql://...)"
            ) from exc
        yield
    finally:
        os.close(descriptor)
