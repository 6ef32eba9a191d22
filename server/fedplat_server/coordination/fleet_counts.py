"""Counts of all clients by population, label and software version, which are computed at most once a minute."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

from fedplat_server.database.fleet import ClientTraits
from fedplat_server.database.sql_fleet import FleetStore

MAX_AGE_S = 60.0
CHUNK = 5000
"""Number of clients that are read at a time, which bounds the memory."""
MAX_DISTINCT = 1000
"""Number of values from which on a label is not counted any more: each client may have its own value."""

Place = tuple[str, str, str]
"""A population, the name of a label, and its value."""


@dataclasses.dataclass
class FleetCounts:
    """Numbers of clients: all and revoked ones by population, those that are not revoked by label and version."""

    enrolled: Counter[str] = dataclasses.field(default_factory=Counter[str])
    revoked: Counter[str] = dataclasses.field(default_factory=Counter[str])
    labels: Counter[Place] = dataclasses.field(default_factory=Counter[Place])
    versions: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter[tuple[str, str]])
    _num_values: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter[tuple[str, str]])

    def add(self, clients: Sequence[ClientTraits]) -> None:
        """Count clients."""
        for client in clients:
            population = client.population
            self.enrolled[population] += 1
            if client.is_revoked:
                self.revoked[population] += 1
                continue
            self.versions[population, client.software_version] += 1
            for name, value in client.labels.items():
                self._add_label(population, name, value)

    def _add_label(self, population: str, name: str, value: str) -> None:
        place, label = (population, name, value), (population, name)
        if place not in self.labels:
            if self._num_values[label] >= MAX_DISTINCT:
                return
            self._num_values[label] += 1
        self.labels[place] += 1


class FleetCounter:
    """Computes the counts when they are asked for and older than `MAX_AGE_S`. `now` is a monotonic clock."""

    def __init__(self, store: FleetStore, now: Callable[[], float]) -> None:
        self._store = store
        self._now = now
        self._counts: FleetCounts | None = None
        self._counted_at = 0.0
        self._counting = asyncio.Lock()

    async def count(self) -> FleetCounts:
        """Return the counts, at most `MAX_AGE_S` old. Concurrent callers share one computation."""
        async with self._counting:
            if self._counts is None or self._now() - self._counted_at >= MAX_AGE_S:
                self._counts, self._counted_at = await self._count(), self._now()
            return self._counts

    async def _count(self) -> FleetCounts:
        counts, after = FleetCounts(), 0
        while chunk := await self._store.list_traits(after, CHUNK):
            await asyncio.to_thread(counts.add, chunk)
            after = chunk[-1].sequence
        return counts
