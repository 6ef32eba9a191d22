"""The states of simulated clients between rounds, in the representation that an engine chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from fedplat.simulation.engines.interface import ClientTask

State = TypeVar("State")


class ClientStates(Generic[State]):
    """The state of each client that has one.

    A new state takes effect at once, and can be undone until the client begins its next task. `release` is called with
    each state that is not needed any more.
    """

    def __init__(self, release: Callable[[State], object] = lambda state: None) -> None:
        self._release = release
        self._now: dict[int, State] = {}
        self._before: dict[int, tuple[ClientTask, State | None]] = {}

    def begin(self, task: ClientTask) -> State | None:
        """Return the state that a client begins a task with, or None. The previous task can no longer be undone."""
        _, before = self._before.pop(task.client, (None, None))
        if before is not None:
            self._release(before)
        return self._now.get(task.client)

    def put(self, task: ClientTask, state: State) -> None:
        """Store the state that a task ended with; the one it began with is kept for `undo`."""
        self._before[task.client] = task, self._now.get(task.client)
        self._now[task.client] = state

    def undo(self, task: ClientTask) -> None:
        """Restore the state that a task began with, if the task is the last of its client to have stored one."""
        last, before = self._before.get(task.client, (None, None))
        if last != task:
            return
        del self._before[task.client]
        self._release(self._now.pop(task.client))
        if before is not None:
            self._now[task.client] = before

    def clear(self) -> None:
        """Release all states."""
        for state in (*self._now.values(), *(before for _, before in self._before.values() if before is not None)):
            self._release(state)
        self._now, self._before = {}, {}

    def replace(self, states: Mapping[int, State]) -> None:
        """Replace all states."""
        self.clear()
        self._now.update(states)

    def __iter__(self) -> Iterator[tuple[int, State]]:
        return iter(self._now.items())
