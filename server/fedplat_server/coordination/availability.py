"""The fleet as it is and was: the availability of each population by hour, and counts of all clients.

It is counted in memory, and stored at most once a minute, when an hour ends and when the daemon stops: one row for each
population and hour. After a restart within an hour, clients that checked in before are not known any more; the store
keeps the larger number.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from fedplat.rounds import Coordinator
from fedplat_server import errors, logs
from fedplat_server.database.sql_clients import AvailabilityHour, ClientTraits, FleetStore

HOUR_S = 3600.0
SAMPLE_S = 5.0
"""Interval at which the clients that are there are counted."""
STORE_EVERY = 12
"""Number of samples between two transactions: one minute."""
KEEP_S = 366 * 24 * HOUR_S
"""Age at which hours are removed."""


def hour_of(unix_s: float) -> float:
    """Return the time at which the hour of a time began."""
    return unix_s - unix_s % HOUR_S


def count_available(coordinator: Coordinator) -> Counter[str]:
    """Return the number of clients that wait or work, by population."""
    found = Counter[str]()
    for job in coordinator.jobs.values():
        found[job.spec.population] += job.num_busy
    for population, number in coordinator.room.count_by_population().items():
        found[population] += number
    return +found


class AvailabilityTracker:
    """The counts of the current hour, and the task that stores them. `now_unix_s` is the wall clock."""

    def __init__(
        self, store: FleetStore, coordinator: Coordinator, now_unix_s: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._now_unix_s = now_unix_s
        self._hour = hour_of(now_unix_s())
        self._seen: dict[str, set[str]] = {}
        self._most = Counter[str]()
        self._ended: list[AvailabilityHour] = []
        self._task: asyncio.Task[None] | None = None

    def record(self, client_id: str, population: str) -> None:
        """Record that a client checks in."""
        self._end_hour()
        self._seen.setdefault(population, set()).add(client_id)

    def sample(self) -> None:
        """Count the clients that are there now."""
        self._end_hour()
        self._most |= count_available(self._coordinator)

    @property
    def current(self) -> Sequence[AvailabilityHour]:
        """The current hour so far, of each population that has had a client."""
        return _hours(self._hour, self._seen, self._most)

    def begin(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="availability")

    async def close(self) -> None:
        """Stop the task, and store the counts."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.sample()
        await self.flush()

    async def flush(self) -> None:
        """Store the current hour, and those that have ended; later again if the database does not answer."""
        ended, hours = self._ended, [*self._ended, *self.current]
        try:
            await self._store.record_availability(hours)
        except errors.LeadershipLostError:
            return
        except errors.StoreError as exc:
            logs.get().warning("the availability could not be stored", error=str(exc))
        else:
            self._ended = [hour for hour in self._ended if hour not in ended]

    def _end_hour(self) -> None:
        hour = hour_of(self._now_unix_s())
        if hour != self._hour:
            self._ended += self.current
            self._hour, self._seen, self._most = hour, {}, Counter[str]()

    async def _run(self) -> None:
        num_samples = 0
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()
            num_samples += 1
            if self._ended or num_samples % STORE_EVERY == 0:
                await self.flush()


def _hours(hour: float, seen: Mapping[str, Collection[str]], most: Mapping[str, int]) -> list[AvailabilityHour]:
    names = sorted({*seen, *most})
    # A client that was there has also been seen, perhaps in the hour before.
    return [AvailabilityHour(name, hour, len(seen.get(name, ())), most.get(name, 0)) for name in names]


MAX_COUNTS_AGE_S = 60.0
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
            if self._counts is None or self._now() - self._counted_at >= MAX_COUNTS_AGE_S:
                self._counts, self._counted_at = await self._count(), self._now()
            return self._counts

    async def _count(self) -> FleetCounts:
        counts, after = FleetCounts(), 0
        while chunk := await self._store.list_traits(after, CHUNK):
            await asyncio.to_thread(counts.add, chunk)
            after = chunk[-1].sequence
        return counts
