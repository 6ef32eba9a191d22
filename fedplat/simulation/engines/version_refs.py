"""Reference counts of the model versions that tasks in progress use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fedplat.simulation.engines.interface import ClientTask


class Versions:
    """Counts the tasks in progress of each version; calls `forget` for a retired version when its last task ends."""

    def __init__(self, forget: Callable[[int], object]) -> None:
        self._forget = forget
        self._in_progress: Counter[int] = Counter()
        self._retired: set[int] = set()

    def begin(self, task: ClientTask) -> None:
        """Count a task that has begun."""
        self._in_progress[task.version] += 1

    def end(self, task: ClientTask) -> None:
        """Uncount a task that has its result or was dropped."""
        self._in_progress[task.version] -= 1
        if not self._in_progress[task.version]:
            del self._in_progress[task.version]
            if task.version in self._retired:
                self._retired.remove(task.version)
                self._forget(task.version)

    def retire(self, version: int) -> None:
        """Forget a version that no later task uses, now or when its last task ends."""
        if version in self._in_progress:
            self._retired.add(version)
        else:
            self._forget(version)
