"""A store that fails: `Daemon(config, open_store=...)` runs on it as on any other.

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

from fedplat_server.database.store import Store
from fedplat_server.errors import StoreUnavailableError

SPARED = 4
"""Number of equal calls after a failed one that do not fail, so that a caller that tries again succeeds."""
PARTS = frozenset(
    {
        *("jobs", "assignments", "clients", "fleet", "operators", "audit", "ledger", "retention"),
        *("events", "webhooks", "traces", "contents"),
    }
)


@dataclasses.dataclass(frozen=True)
class Faults:
    """The faults of a call, each with a probability of its own. `longest_delay_s` bounds the delays."""

    seed: int
    fail_before: float = 0.0
    fail_after: float = 0.0
    delay: float = 0.0
    longest_delay_s: float = 0.005


class FaultyStore:
    """Wraps a store and its parts. `faults` may be set at any time; `injected` counts what was drawn, by kind.

    Calls are counted, and faults put in by hand, by the name of the method, whatever its part. `inner` may be set
    later, but before the first call.
    """

    inner: Store

    def __init__(self, store: Store | None = None, faults: Faults | None = None) -> None:
        if store is not None:
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
        """The faults to draw from, if any."""
        return self._faults

    @faults.setter
    def faults(self, faults: Faults | None) -> None:
        self._faults = faults
        self._random = random.Random(faults.seed if faults is not None else 0)

    @property
    def is_open(self) -> bool:
        """Whether there is an inner store: the daemon leads, or has led."""
        return "inner" in vars(self)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError("the daemon has not opened its store yet")
        part = getattr(self.inner, name)
        if name in PARTS:
            return _FaultyPart(self, part)
        return part if name in ("close", "sever") else self.wrap(name, part)

    def wrap(self, name: str, method: Any) -> Any:
        """Return a method that fails as this store does."""

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

        return call if inspect.iscoroutinefunction(method) else method

    def _draw(self, name: str, args: tuple[Any, ...]) -> str:
        """Return the kind of fault of this call; empty for none."""
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


class _FaultyPart:
    """One part of a store that fails."""

    def __init__(self, store: FaultyStore, part: object) -> None:
        self._store = store
        self._part = part

    def __getattr__(self, name: str) -> Any:
        return self._store.wrap(name, getattr(self._part, name))
