"""Several processes that together are one client; `fedplat_client.trainers.distributed` implements it with PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Protocol

from fedplat.config.plugins import Plugins
from fedplat_client import cancellation
from fedplat_client.task import EvaluateFunction, TrainFunction


class ProcessGroup(Protocol):
    """This process's membership in the group."""

    @property
    def leads(self) -> bool:
        """True if this process is the client; the others follow it."""
        ...

    def follow(
        self, trainers: Mapping[str, TrainFunction], evaluators: Mapping[str, EvaluateFunction], plugins: Plugins
    ) -> None:
        """Join the trainings and evaluations of the leading process until it ends."""

    def release(self) -> None:
        """Let the following processes end."""


_groups: list[ProcessGroup] = []


def form(group: ProcessGroup) -> None:
    """Set the group of this process; called when a trainer is created that trains in all processes of the group."""
    _groups[:] = [group]


def current() -> ProcessGroup | None:
    """Return the group of this process, or None if it is a client of one process."""
    return _groups[0] if _groups else None


def run_follower(
    trainers: Mapping[str, TrainFunction], evaluators: Mapping[str, EvaluateFunction], plugins: Plugins
) -> bool:
    """Follow the leader until it ends, unless this process leads or has no group; return whether it followed."""
    group = current()
    if group is None or group.leads:
        return False
    # A signal to all processes also reaches the leader, which ends its task and releases the followers.
    with cancellation.on_signals(lambda: None):
        group.follow(trainers, evaluators, plugins)
    return True


@contextlib.contextmanager
def lead() -> Generator[None]:
    """Release the following processes, if there are any, at the end of the block."""
    group = current()
    try:
        yield
    finally:
        if group is not None:
            group.release()
