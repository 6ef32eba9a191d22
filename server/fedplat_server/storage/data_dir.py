"""The data folder: its permissions, and the lock of the processes that use it.

The database has the labels of clients, their statements about their data, and the audit log; blobs are models. So only
the owner may access the folder. Every `fedplat-server` command runs with the umask `PRIVATE_UMASK`, which its child
processes inherit; `protect` changes the permissions of older files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Generator, Iterator
from pathlib import Path

from fedplat import forks
from fedplat_server.errors import ConfigError, FolderInUseError

PRIVATE_UMASK = 0o077
_OTHERS = 0o077
_BESIDE_DATABASE = ("", "-wal", "-shm", "-journal")


def make(folder: Path) -> None:
    """Create a data folder that only its owner may enter, if it does not exist. Raises `ConfigError` if it cannot."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"the data folder {folder} cannot be made: {exc.strerror}; choose another folder with --data-dir"
        ) from exc


def protect(folder: Path, database: Path | None = None) -> list[str]:
    """Deny other users of the host access to a data folder and its content; return a warning for what stays accessible.

    The first level is enough: a folder without permissions protects its content. `database` is a SQLite file, which
    may be in another folder; SQLite gives its `-wal` and `-shm` the mode of the file itself.
    """
    paths = [folder, *_inside(folder)]
    if database is not None and database.parent != folder:
        paths += [database.with_name(database.name + ending) for ending in _BESIDE_DATABASE]
    return [warning for path in paths if (warning := _close(path))]


def _inside(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from sorted(folder.iterdir())


def _close(path: Path) -> str:
    """Deny other users access to a file or folder; return a warning if it stays accessible, or ""."""
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):  # the target may be meant for others: do not change its permissions
            status = path.stat()
            reason = "it is a symbolic link" if status.st_mode & _OTHERS else ""
        else:
            reason = ""
            if status.st_mode & _OTHERS:
                path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
    except FileNotFoundError:
        return ""
    except OSError as exc:
        reason = exc.strerror or str(exc)
    if not reason:
        return ""
    return f"other users of this host may read {path}, and it could not be closed ({reason}): run chmod go-rwx on it"


@contextlib.contextmanager
def lock_data_dir(folder: Path, *, shared: bool) -> Generator[None]:
    """Lock a data folder, which is created if needed: exclusively, or shared with other daemons of the same database.

    Raises `FolderInUseError` if another process holds a conflicting lock, and `ConfigError` if the lock has no place.
    """
    make(folder)
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise ConfigError(f"the data folder {folder} cannot be written to: {exc.strerror}") from exc
    with forks.keep_descriptor(descriptor):
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as exc:
            raise FolderInUseError(
                f"another fedplat-server uses {folder}; stop it, or choose another folder with --data-dir. "
                "(Several daemons may share a folder if they share a PostgreSQL database: FEDPLAT_DATABASE or "
                "--database)"
            ) from exc
        yield
