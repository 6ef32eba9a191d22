"""The clock of a daemon's deadlines, which a test sets forward instead of waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fedplat_server.coordination.runner import Runner
from fedplat_server.leader import parts


class DeadlineClock:
    """Real time, and what has been skipped."""

    def __init__(self) -> None:
        self.skipped_s = 0.0
        self._timers: set[_Timer] = set()

    def time(self) -> float:
        return asyncio.get_running_loop().time() + self.skipped_s

    def call_at(self, when: float, callback: Callable[[], object], /) -> _Timer:
        timer = _Timer(when, callback, self._timers.discard)
        self._timers.add(timer)
        timer.schedule(self.skipped_s)
        return timer

    def skip(self, seconds: float) -> None:
        """Set the clock forward; what is due then is called at once."""
        self.skipped_s += seconds
        for timer in self._timers:
            timer.schedule(self.skipped_s)


class _Timer:
    def __init__(self, when: float, callback: Callable[[], object], end: Callable[[_Timer], None]) -> None:
        self._when = when
        self._callback = callback
        self._end = end
        self._handle: asyncio.TimerHandle | None = None

    def schedule(self, skipped_s: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = asyncio.get_running_loop().call_at(self._when - skipped_s, self._fire)

    def cancel(self) -> None:
        self._end(self)
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        self._end(self)
        self._callback()


@pytest.fixture
def deadline_clock(monkeypatch: pytest.MonkeyPatch) -> DeadlineClock:
    """The clock of the deadlines of all daemons that the test starts in this process."""
    clock = DeadlineClock()

    def make(coordinator: Any, store: Any, loop: Any, **options: Any) -> Runner:
        return Runner(coordinator, store, clock, **options)

    monkeypatch.setattr(parts, "Runner", make)
    return clock
