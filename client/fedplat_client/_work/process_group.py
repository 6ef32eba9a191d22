"""Several processes that together are one client; what makes them one needs PyTorch, and is in `trainers.crew`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Protocol

from fedplat_client import cancellation
from fedplat_client.task import TrainFunction


class ProcessGroup(Protocol):
    """This process's place among them."""

    @property
    def leads(self) -> bool:
        """Whether this process is the client; the others follow it."""
        ...

    def follow(self, trainers: Mapping[str, TrainFunction]) -> None:
        """Joins the trainings of the process that leads, until that ends."""
        ...

    def release(self) -> None:
        """Lets the processes that follow end."""
        ...


_groups: list[ProcessGroup] = []


def form(group: ProcessGroup) -> None:
    """Makes the processes of a crew one client, as soon as a trainer is made that trains in all of them."""
    _groups[:] = [group]


def current() -> ProcessGroup | None:
    """The crew of this process; None where it is a client by itself."""
    return _groups[0] if _groups else None


def run_follower(trainers: Mapping[str, TrainFunction]) -> bool:
    """Follows the leader to its end, if this process is not the one that leads; whether it did."""
    crew = current()
    if crew is None or crew.leads:
        return False
    # Whoever stops all processes stops the one that leads; it ends what it does and dismisses the others.
    with cancellation.on_signals(lambda: None):
        crew.follow(trainers)
    return True


@contextlib.contextmanager
def lead() -> Generator[None]:
    """Within it the others follow, if there are any; then they may end."""
    crew = current()
    try:
        yield
    finally:
        if crew is not None:
            crew.release()
