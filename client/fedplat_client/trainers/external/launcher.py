"""What each kind of external trainer implements: its launcher, and what that has started."""

from __future__ import annotations

from typing import Protocol

from fedplat_client.trainers.external.folder import TaskFolder


class OuterProcess(Protocol):
    """Something that works on a task folder outside of this process."""

    def poll(self) -> str | None:
        """Return None while it runs, "" if it has ended well, else what went wrong, such as "it ended with status 3".

        Raises `ExternalTaskError` if that cannot be found out any more.
        """
        ...

    def stop(self, *, force: bool) -> None:
        """Ask it to end (SIGTERM), or with `force` end it (SIGKILL), with all that it has started."""


class Launcher(Protocol):
    """What starts the programs of one trainer: one object for each kind."""

    @property
    def kind(self) -> str:
        """Name of the kind, which is stored in the task folders."""
        ...

    @property
    def poll_s(self) -> float:
        """The longest pause between two polls, in seconds."""
        ...

    @property
    def continues(self) -> bool:
        """True if what it starts outlives this process, and `attach` finds it again."""
        ...

    def start(self, folder: TaskFolder) -> OuterProcess:
        """Start the program on a folder. Raises `ExternalTaskError`."""
        ...

    def attach(self, folder: TaskFolder) -> OuterProcess | None:
        """Return what an earlier process has started on a folder; None if nothing of it is left."""
        ...

    def end(self, folder: TaskFolder) -> None:
        """End what is left of a program and of all that it has started, at once; harmless without any."""
