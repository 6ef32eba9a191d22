"""The store in a SQL database: one class for each kind of record, and the lease that fences older leaders.

Every method of `JobStore`, `ClientStore` and the others is one transaction. If a method has a parameter `audit`, the
same transaction appends these entries to the audit log. Changes of jobs, clients, operators, budgets and webhooks also
append their events (`records.events`). The contract tests `tests/server/store/test_contract*.py` run on both databases.

Errors are `StoreUnavailableError` (try again later), `StaleRevisionError`, `PopulationChangedError` and
`ParticipationError` (read again first) and `LeadershipLostError`; those of a database library are translated.
Stored times are seconds since 1970 on the wall clock. They are for people, and a restart restores the deadlines of
assignments from them; a running server makes no decisions based on them.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import sqlalchemy
from sqlalchemy import Connection, Float, func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from fedplat.config.plugins import BUILTIN, Plugins
from fedplat_server import errors, logs
from fedplat_server.database import rows, schema, transactions
from fedplat_server.database.engine import ABANDONED_S, WRITES, async_url, create_engine, translate_errors
from fedplat_server.database.records import JobFileReader
from fedplat_server.database.sql_assignments import AssignmentStore
from fedplat_server.database.sql_audit import AuditStore, EventStore, OperatorStore
from fedplat_server.database.sql_clients import ClientStore, FleetStore
from fedplat_server.database.sql_contents import ContentStore
from fedplat_server.database.sql_deletion import DeletionStore
from fedplat_server.database.sql_jobs import JobStore
from fedplat_server.database.sql_ledger import LedgerStore
from fedplat_server.database.sql_retention import RetentionStore
from fedplat_server.database.sql_traces import TraceStore
from fedplat_server.database.sql_webhooks import WebhookStore
from fedplat_server.database.tables import leases
from fedplat_server.database.transactions import Clock, Database
from fedplat_server.instruments import Instruments
from fedplat_server.records import lease as rules
from fedplat_server.records.lease import Candidate, Lease, LeaseReading


async def open_store(
    database: str, clock: Clock = time.time, plugins: Plugins = BUILTIN, instruments: Instruments | None = None
) -> Store:
    """Open the database at a path or URL. `plugins` are those of this process, with which it reads job files.

    Raises `ConfigError` if that is invalid, `SchemaVersionError` if the database has another schema than this code,
    and `StoreUnavailableError` if it does not answer.
    """
    url = async_url(database)
    await schema.require_usable(url)
    return Store(Database(transactions.driver_for_url(url), instruments), clock, plugins)


class Store:
    """A database, returned by `open_store`, which checks the schema first, and operations that concern all records."""

    def __init__(self, database: Database, clock: Clock, plugins: Plugins = BUILTIN) -> None:
        self._database = database
        files = JobFileReader(plugins)
        self.jobs = JobStore(database, clock, files)
        self.assignments = AssignmentStore(database)
        self.clients = ClientStore(database, clock)
        self.fleet = FleetStore(database)
        self.operators = OperatorStore(database, clock)
        self.audit = AuditStore(database, clock)
        self.ledger = LedgerStore(database, clock, files)
        self.retention = RetentionStore(database, clock)
        self.deletion = DeletionStore(database, clock)
        self.contents = ContentStore(database)
        self.events = EventStore(database, clock)
        self.webhooks = WebhookStore(database, clock)
        self.traces = TraceStore(database)

    async def close(self) -> None:
        """Wait for running transactions and close all connections."""
        await self._database.close()

    async def ping(self) -> None:
        """Wait until the database answers."""
        await self._database.fetch(select(1))

    async def fence(self, term: int) -> None:
        """Reject every later write with `LeadershipLostError` once the lease has a term other than this.

        Raises that error at once if the term has already changed.
        """
        self._database.fence(lambda connection: require_term(connection, term))
        await self._database.write(lambda _: None)

    async def sever(self) -> None:
        """Abort all transactions; they and all later ones fail with `LeadershipLostError`."""
        self._database.sever()


LEASE_NAME = "jobs"
"""The name of the lease: one daemon leads all jobs of a database."""

LEASE_TIMEOUT_S = 2.0
"""The time limit of each statement, shorter than the validity of a lease."""

_T = TypeVar("_T")
_MINE = leases.c.name == LEASE_NAME
# Who locked a row of a table also holds one of these locks on the table, which readers and migrations do not take.
_END_ABANDONED = text("""
SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()
AND xact_start < clock_timestamp() - make_interval(secs => :abandoned_s)
AND pid IN (
    SELECT pid FROM pg_locks
    WHERE relation = 'leases'::regclass AND mode IN ('RowShareLock', 'RowExclusiveLock') AND granted
)
""")


def require_term(connection: Connection, term: int) -> None:
    """Raise `LeadershipLostError` unless this is the term of the lease; keep the term until the transaction ends.

    The lock does not block other writers of the term or its renewals; a candidate that takes the lease waits for it.
    """
    lock = select(leases.c.term).where(_MINE).with_for_update(read=True, key_share=True)
    found = connection.execute(lock).scalar_one_or_none()
    if found != term:
        raise errors.LeadershipLostError(f"another daemon leads in term {found}; the term of this daemon was {term}")


async def open_leases(database: str) -> LeaseStore:
    """Open the lease of a database. Raises the errors of `open_store`."""
    url = async_url(database)
    await schema.require_usable(url)
    return LeaseStore(create_engine(url, timeout_s=LEASE_TIMEOUT_S))


class LeaseStore:
    """The lease of the leading daemon, returned by `open_leases`.

    It has its own connections: a renewal must neither wait for the writes of rounds, nor have their time limit. Its
    methods raise `StoreUnavailableError` if the database does not answer within a short time. A candidate ends
    transactions of a former leader that are `abandoned_s` old.
    """

    def __init__(self, engine: AsyncEngine, abandoned_s: float = ABANDONED_S) -> None:
        self._engine = engine
        self._abandoned_s = abandoned_s
        self._writing = engine.execution_options(**{WRITES: True})

    async def read(self) -> LeaseReading:
        """Return the current lease."""
        return await self._run(self._engine, _read)

    async def acquire(self, candidate: Candidate, secret: str, valid_s: float) -> Lease | None:
        """Give the lease to the candidate, in a new term; None if it is not free."""

        async def transaction(connection: AsyncConnection) -> Lease | None:
            if not rules.is_free(await _read(connection), candidate, valid_s):
                return None
            await self._end_abandoned(connection)
            no_holder = {"holder": "", "address": "", "term": 0, "secret": "", "renewed_unix_s": 0.0}
            first = rows.insert(connection.dialect.name, leases).values(
                name=LEASE_NAME, expires_unix_s=0.0, **no_holder
            )
            await connection.execute(first.on_conflict_do_nothing())
            # The lock waits for every transaction of the old term that has passed the fence.
            await connection.execute(select(leases.c.term).where(_MINE).with_for_update())
            reading = await _read(connection)
            if not rules.is_free(reading, candidate, valid_s):
                return None
            lease = rules.take_lease(reading, candidate, secret, valid_s)
            await connection.execute(leases.update().where(_MINE).values(rows.to_values(lease)))
            return lease

        return await self._run(self._writing, transaction)

    async def renew(self, lease: Lease, valid_s: float) -> bool:
        """Extend a term to `valid_s` from now; False if it is over."""

        async def transaction(connection: AsyncConnection) -> bool:
            now = _now(connection)
            update = leases.update().where(_MINE, leases.c.term == lease.term, leases.c.holder == lease.holder)
            values = update.values(renewed_unix_s=now, expires_unix_s=now + valid_s)
            return (await connection.execute(values)).rowcount == 1

        return await self._run(self._writing, transaction)

    async def release(self, lease: Lease) -> None:
        """End a term, unless it is over."""
        update = leases.update().where(_MINE, leases.c.term == lease.term).values(holder="", secret="")

        async def transaction(connection: AsyncConnection) -> None:
            await connection.execute(update)

        await self._run(self._writing, transaction)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    async def _end_abandoned(self, connection: AsyncConnection) -> None:
        """End the sessions of suspended or unreachable processes that would keep their locks on the free lease.

        PostgreSQL's own timeout for idle transactions does not apply to all of them: to the database, a session whose
        client was stopped in the middle of a statement or of its result is active.
        """
        if connection.dialect.name != "postgresql":
            return
        found = await connection.execute(_END_ABANDONED, {"abandoned_s": self._abandoned_s})
        if ended := [row.pid for row in found]:
            logs.get().warning("ended the database sessions that a former leader had left in a transaction", pids=ended)

    async def _run(self, engine: AsyncEngine, transaction: Callable[[AsyncConnection], Awaitable[_T]]) -> _T:
        with translate_errors(self._engine.url):
            async with engine.connect() as connection:
                try:
                    async with connection.begin():
                        return await transaction(connection)
                except BaseException:
                    # Its last statement may never be answered: use another connection for the next one.
                    await connection.invalidate()
                    raise


async def _read(connection: AsyncConnection) -> LeaseReading:
    row = (await connection.execute(select(leases).where(_MINE))).one_or_none()
    now = (await connection.execute(select(_now(connection)))).scalar_one()
    return LeaseReading(rows.to_record(row, Lease) if row is not None and row.term else None, now)


def _now(connection: AsyncConnection) -> sqlalchemy.ColumnElement[float]:
    """Return the time on the database's clock, in seconds since 1970."""
    if connection.dialect.name == "postgresql":
        return sqlalchemy.cast(sqlalchemy.extract("epoch", func.clock_timestamp()), Float)
    return (func.julianday("now", type_=Float) - 2440587.5) * 86400.0
