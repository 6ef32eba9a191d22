"""The data folder: who may read it, and the lock of the process that uses it.

The database has the labels of clients, what they say of their data, and the audit log; blobs are models. So the folder
is for its owner only. Every `fedplat-server` command runs with the umask `PRIVATE_UMASK`, which everything that it
starts inherits; what was made before that is closed by `protect`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

from fedplat_server.errors import ConfigError

PRIVATE_UMASK = 0o077
_OTHERS = 0o077
_BESIDE_DATABASE = ("", "-wal", "-shm", "-journal")


def make(folder: Path) -> None:
    """Make a data folder that only its owner may enter, unless there is one. Raises `ConfigError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"the data folder {folder} cannot be made: {exc.strerror}") from exc


def protect(folder: Path, database: Path | None = None) -> list[str]:
    """Take a data folder, and what lies in it, away from other users of the host; return a warning for what stays open.

    The first level is enough: a folder that is closed protects what lies below. `database` is a SQLite file, which
    may lie elsewhere; SQLite gives its `-wal` and `-shm` the mode of the file itself.
    """
    paths = [folder, *_inside(folder)]
    if database is not None and database.parent != folder:
        paths += [database.with_name(database.name + ending) for ending in _BESIDE_DATABASE]
    return [warning for path in paths if (warning := _close(path))]


def _inside(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(folder.iterdir())


def _close(path: Path) -> str:
    """Why a file or folder stays open to other users, in words; empty if it is closed, or gone."""
    try:
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):  # what it leads to may serve others as well: not ours to change
            found = path.stat()
            reason = "it is a symbolic link" if found.st_mode & _OTHERS else ""
        else:
            reason = ""
            if found.st_mode & _OTHERS:
                path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        reason = exc.strerror or str(exc)
    if not reason:
        return ""
    return f"other users of this host may read {path}, and it could not be closed ({reason}): run chmod go-rwx on it"


@contextlib.contextmanager
def lock_data_dir(folder: Path, *, shared: bool) -> Generator[None]:
    """Holds a data folder, which is made if need be: for this process alone, or with others of the same database.

    Raises `ConfigError` when another process holds it in a way that does not go with this.
    """
    make(folder)
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
                "(Several daemons may share a folder if they share a PostgreSQL database: FEDPLAT_DATABASE or "
                "--database-file)"
            ) from exc
        yield
    finally:
        os.close(descriptor)
