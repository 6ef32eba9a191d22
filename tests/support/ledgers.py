"""The releases of private jobs, as the ledger of a database has them."""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import select

from fedplat.privacy import Mechanism
from fedplat_server.database.records import decode_mechanism
from fedplat_server.database.store import Store
from fedplat_server.database.tables import ledger


class StoredRelease(NamedTuple):
    """A committed version of a private job."""

    version: int
    round: int
    mechanism: Mechanism
    unix_s: float


async def list_releases(store: Store, job_id: str) -> list[StoredRelease]:
    """Return the releases of a job, oldest first."""
    query = select(ledger).where(ledger.c.job_id == job_id).order_by(ledger.c.version)
    found = await store.ledger._database.fetch(query)  # pyright: ignore[reportPrivateUsage]
    return [StoredRelease(row.version, row.round, decode_mechanism(row.mechanism), row.unix_s) for row in found]
