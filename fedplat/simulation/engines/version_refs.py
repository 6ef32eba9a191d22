"""Which model versions works still need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from fedplat.simulation.engines.interface import Work


class Versions:
    """Counts the works under way of each version; a retired one is forgotten when its last work ends."""

    def __init__(self, forget: Callable[[int], object]) -> None:
        self._forget = forget
        self._under_way: Counter[int] = Counter()
        self._retired: set[int] = set()

    def begin(self, work: Work) -> None:
        """A work is under way."""
        self._under_way[work.version] += 1

    def end(self, work: Work) -> None:
        """A work has its result, or nobody wants it."""
        self._under_way[work.version] -= 1
        if not self._under_way[work.version]:
            del self._under_way[work.version]
            if work.version in self._retired:
                self._retired.remove(work.version)
                self._forget(work.version)

    def retire(self, version: int) -> None:
        """No further work begins with it."""
        if version in self._under_way:
            self._retired.add(version)
        else:
            self._forget(version)
