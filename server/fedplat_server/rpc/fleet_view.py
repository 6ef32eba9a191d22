"""The fleet as operators see it: counts by state, label and version, and availability by hour."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from fedplat.wire.v1 import admin_pb2
from fedplat_server.coordination.availability import HOUR_S, KEEP_S, AvailabilityTracker, FleetCounter, FleetCounts
from fedplat_server.coordination.runner import Runner
from fedplat_server.database.fleet import AvailabilityHour
from fedplat_server.database.sql_fleet import FleetStore
from fedplat_server.messages import validation

MAX_LABELS = 20
MAX_VALUES = 20
MAX_VERSIONS = 20
DEFAULT_S = 7 * 24 * HOUR_S
MAX_ROWS = 20_000
"""Maximum number of hours of all populations in a response, which limits its size to about 1 MiB."""


class FleetView:
    """Counts the clients that have enrolled, and those that are there."""

    def __init__(
        self, counter: FleetCounter, store: FleetStore, availability: AvailabilityTracker, runner: Runner
    ) -> None:
        self._counter = counter
        self._store = store
        self._availability = availability
        self._coordinator = runner.coordinator

    async def show(self, request: admin_pb2.ShowFleetRequest) -> admin_pb2.ShowFleetResponse:
        """Return the counts of a population, or of all. Raises `RefusedError` if the request is not valid."""
        population = validation.name(request.population, "population") if request.population else ""
        since = validation.since(request.since_unix_s) or time.time() - DEFAULT_S
        counts = await self._counter.count()
        hours = await self._store.list_availability(max(since, time.time() - KEEP_S), population)
        current = [hour for hour in self._availability.current if population in ("", hour.population)]
        return admin_pb2.ShowFleetResponse(
            populations=self._populations(counts, population),
            labels=_labels(counts, population),
            versions=_versions(counts, population),
            hours=_merge(hours, current),
        )

    def _populations(self, counts: FleetCounts, only: str) -> list[admin_pb2.PopulationCount]:
        busy = Counter[str]()
        for job in self._coordinator.jobs.values():
            busy[job.spec.population] += job.num_busy
        return [
            admin_pb2.PopulationCount(
                population=name,
                num_clients=number,
                num_waiting=self._coordinator.room.num_waiting(name),
                num_busy=busy[name],
                num_revoked=counts.revoked[name],
            )
            for name, number in sorted(counts.enrolled.items())
            if only in ("", name)
        ]


def _labels(counts: FleetCounts, only: str) -> list[admin_pb2.ValueCount]:
    """Return the labels that most clients have, each with its most frequent values."""
    found: dict[str, Counter[str]] = {}
    for (population, name, value), number in counts.labels.items():
        if only in ("", population):
            found.setdefault(name, Counter())[value] += number
    frequent = sorted(found.items(), key=lambda each: (-each[1].total(), each[0]))[:MAX_LABELS]
    return [
        admin_pb2.ValueCount(name=name, value=value, count=number)
        for name, values in frequent
        for value, number in _most_frequent(values, MAX_VALUES)
    ]


def _versions(counts: FleetCounts, only: str) -> list[admin_pb2.ValueCount]:
    found = Counter[str]()
    for (population, version), number in counts.versions.items():
        if only in ("", population):
            found[version] += number
    return [admin_pb2.ValueCount(value=value, count=number) for value, number in _most_frequent(found, MAX_VERSIONS)]


def _most_frequent(values: Counter[str], most: int) -> list[tuple[str, int]]:
    return sorted(values.items(), key=lambda each: (-each[1], each[0]))[:most]


def _merge(stored: Iterable[AvailabilityHour], current: Iterable[AvailabilityHour]) -> list[admin_pb2.AvailabilityHour]:
    """Return the latest hours, with the larger numbers where the current hour is stored already."""
    merged = {(hour.hour_unix_s, hour.population): hour for hour in stored}
    for hour in current:
        key = (hour.hour_unix_s, hour.population)
        before = merged.get(key, hour)
        merged[key] = AvailabilityHour(
            *(hour.population, hour.hour_unix_s),
            num_seen=max(before.num_seen, hour.num_seen),
            max_available=max(before.max_available, hour.max_available),
        )
    latest = sorted(merged)[-MAX_ROWS:]
    return [admin_pb2.AvailabilityHour(**merged[key]._asdict()) for key in latest]
