"""Task folders on which something works that this client does not start (`folder:`).

It is a batch system that fedplat has no launcher for, or a machine without any network to which the folder is carried.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fedplat_client.trainers.external.folder import TaskFolder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FolderLauncher:
    """Someone else."""

    kind: str = "folder"
    poll_s: float = 2.0
    continues: bool = True

    def start(self, folder: TaskFolder) -> WaitingFolder:
        """Say where the folder is."""
        _logger.info("The task waits in %s for a program that writes its result.json.", folder.path)
        return WaitingFolder(folder)

    def attach(self, folder: TaskFolder) -> WaitingFolder:
        """Return the folder."""
        return WaitingFolder(folder)

    def end(self, folder: TaskFolder) -> None:
        """Do nothing: the program finds the file `stop`, or that its folder is gone."""


@dataclass(frozen=True)
class WaitingFolder:
    """A folder that waits for its result."""

    folder: TaskFolder

    def poll(self) -> str | None:
        """Return how it has ended; see `OuterProcess`."""
        return "" if self.folder.has_result else None

    def stop(self, *, force: bool) -> None:
        """Do nothing: the program has the file `stop`."""
