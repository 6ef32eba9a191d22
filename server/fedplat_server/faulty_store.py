"""A store that fails, for tests: `Daemon(config, open_store=...)` runs on it as on any other.

A call may fail before anything happens, take its time, or do its work and then fail, as when a database commits and
its answer is lost. Faults are drawn from a seed, or put in by hand (`outage`, `before`, `after`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from fedplat_server.errors import StoreUnavailableError
from fedplat_server.store.port import Store

SPARED = 4
"""So many calls that ask the same as one that failed are spared after it: who tries again shall get through."""


@dataclasses.dataclass(frozen=True)
class Faults:
    """What befalls a call, each with a probability of its own. `longest_delay_s` bounds the delays."""

    seed: int
    fail_before: float = 0.0
    fail_after: float = 0.0
    delay: float = 0.0
    longest_delay_s: float = 0.005


class FaultyStore:
    """Wraps a store. `faults` may be set at any time; `injected` counts what was drawn, by kind."""

    def __init__(self, store: Store, faults: Faults | None = None) -> None:
        self.inner = store
        self.outage = False
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}
        self.calls: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self._faults: Faults | None = None
        self._random = random.Random()
        self._spared: Counter[tuple[str, object]] = Counter()
        self.faults = faults

    @property
    def faults(self) -> Faults | None:
        """What is drawn from, if anything."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults | None) -> None:
        self._faults = faults
        self._random = random.Random(faults.seed if faults is not None else 0)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name in ("close", "sever") or not inspect.iscoroutinefunction(method):
            return method

        async def call(*args: Any, **keywords: Any) -> Any:
            self.calls[name] += 1
            if self.outage:
                raise StoreUnavailableError("the database is away, says the test")
            if (before := self.before.get(name)) is not None:
                await before()
            fault = self._draw(name, args)
            if fault == "delay" and self._faults is not None:
                await asyncio.sleep(self._random.uniform(0.0, self._faults.longest_delay_s))
            if fault == "fail_before":
                raise StoreUnavailableError("the database does not answer, says the test")
            result = await method(*args, **keywords)
            if fault == "fail_after":
                raise StoreUnavailableError("the database's answer was lost, says the test")
            if (after := self.after.get(name)) is not None:
                await after()
            return result

        return call

    def _draw(self, name: str, args: tuple[Any, ...]) -> str:
        """The kind of fault that this call gets; empty for none."""
        if self._faults is None:
            return ""
        chance = self._random.random()
        kinds = ("fail_before", "fail_after", "delay")
        limits = itertools.accumulate(getattr(self._faults, kind) for kind in kinds)
        drawn = next((kind for kind, limit in zip(kinds, limits, strict=True) if chance < limit), "")
        question = (name, args[0] if args and isinstance(args[0], str | bytes) else None)
        if drawn != "delay":
            if self._spared[question] > 0:
                self._spared[question] -= 1
                return ""
            if drawn:
                self._spared[question] = SPARED
        if drawn:
            self.injected[drawn] += 1
        return drawn
