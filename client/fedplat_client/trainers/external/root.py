"""The place of the task folders of one client: its lock, and what a process that was killed has left there."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fedplat import forks, system
from fedplat_client.errors import DataDirectoryError, DataDirectoryInUseError
from fedplat_client.trainers.external import kinds
from fedplat_client.trainers.external.folder import KEPT_LOG_BYTES, TaskFolder

_PREFIX = "fedplat-task-"
_logger = logging.getLogger(__name__)


class TaskRoot:
    """The folder in which the task folders of one client are. One process at a time uses it.

    A task folder stays until the next task or the end of the process, so that a client that is killed while it reports
    need not train again: the server gives it the same assignment, which has the same folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = contextlib.ExitStack()
        self._left: str | None = None

    def __enter__(self) -> TaskRoot:
        """Lock the folder, and end what a killed process has left running, of the kinds that cannot be continued.

        Raises `DataDirectoryError`; its message describes the remedy.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_parents()
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | system.O_NOFOLLOW | system.O_BINARY, 0o600)
        except OSError as exc:
            raise DataDirectoryError(
                f"the folder of tasks {self.path} cannot be used: {exc}; name another one with --task-root"
            ) from exc
        self._held.enter_context(forks.keep_descriptor(lock))  # its end frees the lock
        try:
            system.lock(lock, wait=False)
        except BlockingIOError as exc:
            self._held.close()
            raise DataDirectoryInUseError(
                f"the folder of tasks {self.path} is in use by another client; stop that client, or name another data "
                "directory or --task-root for this one"
            ) from exc
        except OSError as exc:
            self._held.close()
            raise DataDirectoryError(
                f"the folder of tasks {self.path} cannot be locked: {exc}; name one on a file system with locks "
                "with --task-root"
            ) from exc
        for folder in self._folders():
            if folder.kind not in kinds.CONTINUED:
                _end(folder)
        return self

    def __exit__(self, *_: object) -> None:
        """End and remove all tasks but one that was left on purpose, and free the lock."""
        self._remove_others(self._left)
        self._held.close()

    def find(self, task_id: str) -> TaskFolder:
        """Return the folder of a task, which may not exist yet; end and remove all others."""
        folder = TaskFolder(self.path / f"{_PREFIX}{task_id}")
        self._left = None
        self._remove_others(folder.name)
        return folder

    def leave(self, folder: TaskFolder) -> None:
        """Keep a folder when this object is closed, since its task continues."""
        self._left = folder.name

    def keep_log(self, folder: TaskFolder) -> Path:
        """Keep the end of the log of a task that has failed, instead of that of the last one; return its path."""
        path = self.path / "failed.log"
        content, _ = folder.read_log(0, KEPT_LOG_BYTES)
        temporary = self.path / ".failed.log.new"
        temporary.write_bytes(content)
        temporary.replace(path)
        return path

    def _remove_others(self, name: str | None) -> None:
        for folder in self._folders():
            if folder.name != name:
                _end(folder)
                folder.remove()

    def _folders(self) -> Iterator[TaskFolder]:
        for path in sorted(self.path.glob(f"{_PREFIX}*")):
            if path.is_dir() and not path.is_symlink():
                yield TaskFolder(path)

    def _check_parents(self) -> None:
        """Raise `DataDirectoryError` if other users could put a folder of theirs in the place of this one."""
        for path in (self.path, *self.path.parents):
            found = path.stat()
            if found.st_mode & stat.S_ISVTX:
                continue
            if found.st_mode & stat.S_IWOTH or (path == self.path and found.st_uid != system.user_id()):
                raise DataDirectoryError(
                    f"{path} belongs to or can be changed by other users of this host (mode "
                    f"{stat.S_IMODE(found.st_mode):o}); expected a folder of this user alone, such as "
                    "--task-root DIR with chmod 700 DIR"
                )
            if found.st_mode & stat.S_IWGRP and found.st_gid != os.getgid():
                _logger.warning("The members of a group may change %s, and so the tasks of this client.", path)


def _end(folder: TaskFolder) -> None:
    ender = kinds.ENDERS.get(folder.kind)
    if ender is not None:
        ender(folder)
