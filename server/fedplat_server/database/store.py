"""The store in a SQL database, SQLite or PostgreSQL: one class for each kind of record, on the same transactions.

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

from sqlalchemy import select

from fedplat.config.plugins import BUILTIN, Plugins
from fedplat_server.database import schema, transactions
from fedplat_server.database.engine import async_url
from fedplat_server.database.job_files import JobFileReader
from fedplat_server.database.sql_assignments import AssignmentStore
from fedplat_server.database.sql_audit import AuditStore, OperatorStore
from fedplat_server.database.sql_clients import ClientStore
from fedplat_server.database.sql_events import EventStore
from fedplat_server.database.sql_fleet import FleetStore
from fedplat_server.database.sql_jobs import JobStore
from fedplat_server.database.sql_leases import require_term
from fedplat_server.database.sql_ledger import LedgerStore
from fedplat_server.database.sql_retention import RetentionStore
from fedplat_server.database.sql_traces import TraceStore
from fedplat_server.database.sql_webhooks import WebhookStore
from fedplat_server.database.transactions import Clock, Database
from fedplat_server.instruments import Instruments


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
