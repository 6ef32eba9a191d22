"""The store in a SQL database, SQLite or PostgreSQL: one adapter for each port, on the same transactions."""

from __future__ import annotations

import time

from sqlalchemy import select

from fedplat.config.plugins import BUILTIN, Plugins
from fedplat_server.database import drivers, schema
from fedplat_server.database.engine import async_url
from fedplat_server.database.job_files import JobFileReader
from fedplat_server.database.sql_assignments import SqlAssignments
from fedplat_server.database.sql_audit import SqlAudit
from fedplat_server.database.sql_clients import SqlClients
from fedplat_server.database.sql_events import SqlEvents
from fedplat_server.database.sql_fleet import SqlFleet
from fedplat_server.database.sql_jobs import SqlJobs
from fedplat_server.database.sql_leases import require_term
from fedplat_server.database.sql_ledger import SqlLedger
from fedplat_server.database.sql_operators import SqlOperators
from fedplat_server.database.sql_retention import SqlRetention
from fedplat_server.database.sql_traces import SqlTraces
from fedplat_server.database.sql_webhooks import SqlWebhooks
from fedplat_server.database.transactions import Clock, Database
from fedplat_server.instruments import Instruments


async def open_store(
    database: str,
    clock: Clock = time.time,
    plugins: Plugins = BUILTIN,
    instruments: Instruments | None = None,
) -> SqlStore:
    """Open the database at a path or URL. `plugins` are those of this process, with which it reads job files.

    Raises `ConfigError` if that is invalid, `SchemaVersionError` if the database has another schema than this code,
    and `StoreUnavailableError` if it does not answer.
    """
    url = async_url(database)
    await schema.require_usable(url)
    return SqlStore(Database(drivers.for_url(url), instruments), clock, plugins)


class SqlStore:
    """The adapter of `ports.Store` for SQL databases, returned by `open_store`, which checks the schema first."""

    def __init__(self, database: Database, clock: Clock, plugins: Plugins = BUILTIN) -> None:
        self._database = database
        files = JobFileReader(plugins)
        self.jobs = SqlJobs(database, clock, files)
        self.assignments = SqlAssignments(database)
        self.clients = SqlClients(database, clock)
        self.fleet = SqlFleet(database)
        self.operators = SqlOperators(database, clock)
        self.audit = SqlAudit(database, clock)
        self.ledger = SqlLedger(database, clock, files)
        self.retention = SqlRetention(database, clock)
        self.events = SqlEvents(database, clock)
        self.webhooks = SqlWebhooks(database, clock)
        self.traces = SqlTraces(database)

    async def close(self) -> None:
        """Wait for running transactions and close all connections."""
        await self._database.close()

    async def ping(self) -> None:
        """Wait until the database answers."""
        await self._database.fetch(select(1))

    async def fence(self, term: int) -> None:
        """Reject every later write with `LeadershipLostError` once the lease has another term."""
        self._database.fence(lambda connection: require_term(connection, term))
        await self._database.write(lambda _: None)

    async def sever(self) -> None:
        """Abort all transactions; they and all later ones fail with `LeadershipLostError`."""
        self._database.sever()
