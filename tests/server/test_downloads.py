"""The times of downloads are stored in batches, behind the rounds; availability is counted by hour."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fedplat.rounds import AssignmentId, AttemptKey, Coordinator
from fedplat.rounds.events import ClientCheckedIn
from fedplat_server.coordination import availability
from fedplat_server.coordination.availability import AvailabilityTracker, FleetCounter, FleetCounts
from fedplat_server.coordination.progress import BATCH, Downloads
from fedplat_server.database.sql_clients import AvailabilityHour, ClientTraits
from fedplat_server.errors import StoreUnavailableError

KEY = AttemptKey("j-1", 1, 1)


class DownloadStore:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[Mapping[AssignmentId, float]] = []
        self.stored = asyncio.Event()
        self.is_away = False

    async def record_downloads(self, downloaded_unix_s: Mapping[AssignmentId, float]) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        self.batches.append(downloaded_unix_s)
        self.stored.set()


async def test_downloads_are_stored_together() -> None:
    store, times = DownloadStore(), iter(range(10_000))
    downloads = Downloads(store, interval_s=0.001, now_unix_s=lambda: float(next(times)))
    ids = [AssignmentId(KEY, f"c-{n}") for n in range(BATCH + 5)]
    for name in (*ids, *ids):  # the first time counts
        downloads.record(name)
    assert store.batches == []
    await store.stored.wait()
    await downloads.close()
    assert [len(batch) for batch in store.batches] == [BATCH, 5]
    assert [time for batch in store.batches for time in batch.values()] == list(range(BATCH + 5))
    downloads.record(ids[0])
    await downloads.close()
    assert len(store.batches) == 2


async def test_the_rest_is_stored_at_the_end() -> None:
    store = DownloadStore()
    downloads = Downloads(store, interval_s=1e6)
    downloads.record(AssignmentId(KEY, "c-1"))
    await downloads.close()
    assert [list(batch) for batch in store.batches] == [[AssignmentId(KEY, "c-1")]]


async def test_a_database_that_is_away_loses_times_but_ends_nothing() -> None:
    store = DownloadStore()
    downloads = Downloads(store, interval_s=1e6)
    store.is_away = True
    downloads.record(AssignmentId(KEY, "c-1"))
    await downloads.flush()
    store.is_away = False
    downloads.record(AssignmentId(KEY, "c-2"))
    await downloads.close()
    assert [list(batch) for batch in store.batches] == [[AssignmentId(KEY, "c-2")]]


class FleetStore:
    """Keeps the rows that it is given; `traits` are all clients."""

    def __init__(self, traits: Sequence[ClientTraits] = ()) -> None:
        self.hours: list[AvailabilityHour] = []
        self.traits = traits
        self.is_away = False
        self.num_reads = 0

    async def record_availability(self, hours: Sequence[AvailabilityHour]) -> None:
        if self.is_away:
            raise StoreUnavailableError("away")
        self.hours += hours

    async def list_traits(self, after_sequence: int, limit: int) -> list[ClientTraits]:
        self.num_reads += 1
        return [each for each in self.traits if each.sequence > after_sequence][:limit]


async def test_availability_by_hour() -> None:
    store, coordinator, now = FleetStore(), Coordinator(), 7200.0
    availability = AvailabilityTracker(cast(Any, store), coordinator, lambda: now)
    for name in ("c-1", "c-2", "c-1"):
        availability.record(name, "demo")
        coordinator.room.enter(ClientCheckedIn(name, "demo"))
    availability.sample()
    coordinator.room.leave("c-1")
    availability.sample()  # the most at one time counts
    assert availability.current == [AvailabilityHour("demo", 7200.0, 2, 2)]
    now = 7200.0 + 3599.0
    availability.record("c-3", "other")
    now += 2.0
    availability.record("c-4", "demo")
    store.is_away = True
    await availability.flush()
    store.is_away = False
    now += 3600.0
    await availability.close()
    assert store.hours == [
        *(AvailabilityHour("demo", 7200.0, 2, 2), AvailabilityHour("other", 7200.0, 1, 0)),
        AvailabilityHour("demo", 10800.0, 1, 0),
        AvailabilityHour("demo", 14400.0, 0, 1),  # c-2 still waits
    ]


def traits(sequence: int, **changes: Any) -> ClientTraits:
    values: dict[str, Any] = {
        "population": "demo",
        "labels": {"n": str(sequence)},
        "software_version": "1",
        "is_revoked": False,
    }
    return ClientTraits(sequence, **(values | changes))


async def test_the_fleet_is_counted_at_most_once_a_minute() -> None:
    now = 0.0
    clients = [traits(n, labels={"even": str(n % 2 == 0)}) for n in range(1, 12_002)]
    store = FleetStore([*clients, traits(12_002, is_revoked=True, population="other")])
    counter = FleetCounter(cast(Any, store), lambda: now)
    first, same = await asyncio.gather(counter.count(), counter.count())
    assert first is same
    assert store.num_reads == 4  # in chunks of 5,000, and one that is empty
    assert (first.enrolled, first.revoked) == (Counter(demo=12_001, other=1), Counter(other=1))
    assert first.labels == {("demo", "even", "True"): 6000, ("demo", "even", "False"): 6001}
    assert first.versions == {("demo", "1"): 12_001}
    now = 59.0
    assert await counter.count() is first
    now = 60.0
    assert await counter.count() is not first


def test_a_label_with_a_value_of_each_client_needs_little_memory() -> None:
    counts = FleetCounts()
    counts.add([traits(n) for n in range(5000)])
    assert len(counts.labels) == availability.MAX_DISTINCT
