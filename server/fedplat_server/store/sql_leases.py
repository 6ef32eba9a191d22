"""The lease in a SQL database, and the fence that keeps a leader of an older term from writing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import sqlalchemy
from sqlalchemy import Connection, Float, func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from fedplat_server.cluster import lease as rules
from fedplat_server.cluster.lease import Candidate, Lease, Sighting
from fedplat_server.errors import LeadershipLostError
from fedplat_server.store import rows, schema, writes
from fedplat_server.store.engine import WRITES, async_url, create_engine, translated
from fedplat_server.store.tables import leases

NAME = "jobs"
"""One lease leads all jobs of a database."""

TIMEOUT_S = 2.0
"""How long the database may take to answer: less than a lease is valid."""

_T = TypeVar("_T")
_MINE = leases.c.name == NAME


def require_term(connection: Connection, term: int) -> None:
    """The fence: raises `LeadershipLostError` unless this is the lease's term until the transaction has ended.

    The lock lets other writers of the term and its renewals pass; who takes the lease waits for it.
    """
    lock = select(leases.c.term).where(_MINE).with_for_update(read=True, key_share=True)
    found = connection.execute(lock).scalar_one_or_none()
    if found != term:
        raise LeadershipLostError(f"another daemon leads: its term is {found}, that of this one was {term}")


async def open_leases(database: str, timeout_s: float = TIMEOUT_S) -> SqlLeases:
    """Opens the lease of a database; errors as with `open_store`."""
    url = async_url(database)
    await schema.require_head(url)
    return SqlLeases(create_engine(url, timeout_s=timeout_s))


class SqlLeases:
    """The adapter of `leases.Leases` for SQL databases; made by `open_leases`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writing = engine.execution_options(**{WRITES: True})

    async def read(self) -> Sighting:
        """The lease as it is now."""
        return await self._run(self._engine, _sight)

    async def take(self, candidate: Candidate, secret: str, valid_s: float) -> Lease | None:
        """Gives the lease to the candidate, in a new term; None when it is not free."""

        async def work(connection: AsyncConnection) -> Lease | None:
            nobody = {"holder": "", "address": "", "term": 0, "secret": "", "renewed_unix_s": 0.0}
            first = writes.insert(connection.dialect.name, leases).values(name=NAME, expires_unix_s=0.0, **nobody)
            await connection.execute(first.on_conflict_do_nothing())
            # Waits for every transaction of the old term that passed the fence.
            await connection.execute(select(leases.c.term).where(_MINE).with_for_update())
            sighting = await _sight(connection)
            if not rules.is_free(sighting, candidate, valid_s):
                return None
            lease = rules.taken(sighting, candidate, secret, valid_s)
            await connection.execute(leases.update().where(_MINE).values(_values(lease)))
            return lease

        return await self._run(self._writing, work)

    async def renew(self, lease: Lease, valid_s: float) -> bool:
        """Lets a term go on, for `valid_s` from now; False when it is over."""

        async def work(connection: AsyncConnection) -> bool:
            now = _now(connection)
            update = leases.update().where(_MINE, leases.c.term == lease.term, leases.c.holder == lease.holder)
            values = update.values(renewed_unix_s=now, expires_unix_s=now + valid_s)
            return (await connection.execute(values)).rowcount == 1

        return await self._run(self._writing, work)

    async def release(self, lease: Lease) -> None:
        """Ends a term, if it is not over."""
        update = leases.update().where(_MINE, leases.c.term == lease.term).values(holder="", secret="")

        async def work(connection: AsyncConnection) -> None:
            await connection.execute(update)

        await self._run(self._writing, work)

    async def close(self) -> None:
        """Lets go of every connection."""
        await self._engine.dispose()

    async def _run(self, engine: AsyncEngine, work: Callable[[AsyncConnection], Awaitable[_T]]) -> _T:
        with translated(self._engine.url):
            async with engine.connect() as connection:
                try:
                    async with connection.begin():
                        return await work(connection)
                except BaseException:
                    # What it was asked last may never be answered; the next question goes another way.
                    await connection.invalidate()
                    raise


async def _sight(connection: AsyncConnection) -> Sighting:
    row = (await connection.execute(select(leases).where(_MINE))).one_or_none()
    now = (await connection.execute(select(_now(connection)))).scalar_one()
    return Sighting(_lease(row) if row is not None and row.term else None, now)


def _now(connection: AsyncConnection) -> sqlalchemy.ColumnElement[float]:
    """The moment on the database's clock, in seconds since 1970."""
    if connection.dialect.name == "postgresql":
        return sqlalchemy.cast(sqlalchemy.extract("epoch", func.clock_timestamp()), Float)
    return (func.julianday("now", type_=Float) - 2440587.5) * 86400.0


def _lease(row: rows.Row) -> Lease:
    return Lease(row.holder, row.address, row.term, row.secret, row.renewed_unix_s, row.expires_unix_s)


def _values(lease: Lease) -> rows.Values:
    return {
        "holder": lease.holder,
        "address": lease.address,
        "term": lease.term,
        "secret": lease.secret,
        "renewed_unix_s": lease.renewed_unix_s,
        "expires_unix_s": lease.expires_unix_s,
    }
