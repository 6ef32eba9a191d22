"""Traits of all clients, and the availability of populations by hour, in a SQL database."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import case, select

from fedplat_server.database import rows, transactions
from fedplat_server.database.tables import availability, clients


class FleetStore:
    """Traits of all clients, and the availability of populations by hour."""

    def __init__(self, database: transactions.Database) -> None:
        self._database = database

    async def list_traits(self, after_sequence: int, limit: int) -> list[ClientTraits]:
        """Return the first `limit` clients after a sequence number."""
        columns = (clients.c.sequence, clients.c.population, clients.c.labels, clients.c.software_version)
        query = select(*columns, clients.c.revoked_unix_s).where(clients.c.sequence > after_sequence)
        found = await self._database.fetch(query.order_by(clients.c.sequence).limit(limit))
        return [
            ClientTraits(row.sequence, row.population, row.labels, row.software_version, row.revoked_unix_s is not None)
            for row in found
        ]

    async def record_availability(self, hours: Sequence[AvailabilityHour]) -> None:
        """Store hours; of each number the larger one of the stored and the new value is kept."""
        statement = rows.insert(self._database.dialect, availability)
        larger = {
            name: case(
                (statement.excluded[name] > availability.c[name], statement.excluded[name]), else_=availability.c[name]
            )
            for name in ("num_seen", "max_available")
        }
        upsert = statement.on_conflict_do_update(index_elements=["population", "hour_unix_s"], set_=larger)
        values = [hour._asdict() for hour in sorted(hours)]  # in one order, so that two writers cannot deadlock
        if values:
            await self._database.write(lambda connection: connection.execute(upsert, values))

    async def list_availability(self, since_unix_s: float, population: str = "") -> list[AvailabilityHour]:
        """Return the hours that began at a time or later, of one population or of all (""), oldest first."""
        query = select(availability).where(availability.c.hour_unix_s >= since_unix_s)
        if population:
            query = query.where(availability.c.population == population)
        query = query.order_by(availability.c.hour_unix_s, availability.c.population)
        return [rows.to_record(row, AvailabilityHour) for row in await self._database.fetch(query)]

    async def remove_availability(self, before_unix_s: float) -> int:
        """Remove the hours that began before a time; return their number."""
        delete = availability.delete().where(availability.c.hour_unix_s < before_unix_s)
        return await self._database.write(lambda connection: connection.execute(delete).rowcount)


@dataclasses.dataclass(frozen=True, slots=True)
class ClientTraits:
    """What is counted of a client. `sequence` grows in the order of enrollment."""

    sequence: int
    population: str
    labels: Mapping[str, str]
    software_version: str
    is_revoked: bool


class AvailabilityHour(NamedTuple):
    """An hour of a population, from `hour_unix_s` on.

    `num_seen` different clients checked in, and `max_available` is the most that waited or worked at one time.
    """

    population: str
    hour_unix_s: float
    num_seen: int
    max_available: int
