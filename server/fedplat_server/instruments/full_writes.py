"""Writes that fail because a disk is full: noted for the process, and counted by each daemon since its start."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Literal

Place = Literal["models", "updates", "database"]
"""What a disk is full for."""


class _Process:
    def __init__(self) -> None:
        self.counts: dict[Place, int] = {"models": 0, "updates": 0, "database": 0}
        self.last_unix_s: float | None = None
        self.lock = threading.Lock()


_process = _Process()


def note_full(place: Place) -> None:
    """Count a write that failed because the disk was full."""
    with _process.lock:
        _process.counts[place] += 1
        _process.last_unix_s = time.time()


class FullWrites:
    """The writes of this process that have failed since this was made because a disk was full."""

    def __init__(self) -> None:
        self._before = dict(_process.counts)

    @property
    def by_place(self) -> Mapping[Place, int]:
        """Their number: those of models, updates and the database."""
        return {place: count - self._before[place] for place, count in _process.counts.items()}

    @property
    def num(self) -> int:
        """Their number."""
        return sum(self.by_place.values())

    @property
    def last_unix_s(self) -> float | None:
        """The time of the last of them; None if there was none."""
        return _process.last_unix_s if self.num else None
