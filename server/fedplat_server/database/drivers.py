"""Drivers of transactions: SQLite blocks in threads, PostgreSQL uses the event loop.

For both, a transaction is a plain function of a connection of SQLAlchemy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import sqlalchemy
from sqlalchemy.engine import URL

from fedplat_server.database.engine import NUM_READERS, WRITES, create_blocking_engine, create_engine, num_writers

_T = TypeVar("_T")
Transaction = Callable[[sqlalchemy.Connection], _T]


class Transactions(Protocol):
    """A driver that runs transactions on one database. It raises the errors of SQLAlchemy."""

    @property
    def engine(self) -> sqlalchemy.Engine:
        """The engine that opens the connections, for its events, its dialect and its URL."""
        ...

    async def run(self, transaction: Transaction[_T], *, writes: bool) -> _T:
        """Run a transaction and commit it if it `writes`; otherwise all of its queries see one snapshot."""
        ...

    async def close(self) -> None:
        """Wait for running transactions and close all connections."""
        ...


def for_url(url: URL) -> Transactions:
    """Return the driver for a URL of `engine.async_url`. The tables must exist."""
    return ThreadedSqlite(url) if url.get_backend_name() == "sqlite" else AsyncPostgres(url)


class ThreadedSqlite:
    """The driver of SQLite, which runs each transaction in a thread.

    An asynchronous driver changes threads at each step of each statement, which costs more than the database itself.
    """

    def __init__(self, url: URL) -> None:
        self.engine = create_blocking_engine(url)
        self._writing = self.engine.execution_options(**{WRITES: True})
        self._threads = ThreadPoolExecutor(NUM_READERS + num_writers(url), thread_name_prefix="database")

    async def run(self, transaction: Transaction[_T], *, writes: bool) -> _T:
        """Run a transaction in a thread, to its end even if the awaiting task is cancelled."""
        run = self._write if writes else self._read
        return await asyncio.get_running_loop().run_in_executor(self._threads, run, transaction)

    async def close(self) -> None:
        """Wait for running transactions and close all connections."""
        # In another thread: SQLite may be waiting for another process.
        await asyncio.to_thread(self._threads.shutdown)
        self.engine.dispose()

    def _write(self, transaction: Transaction[_T]) -> _T:
        with self._writing.begin() as connection:
            return transaction(connection)

    def _read(self, transaction: Transaction[_T]) -> _T:
        with self.engine.connect() as connection:
            return transaction(connection)


class AsyncPostgres:
    """The driver of PostgreSQL, over a socket."""

    def __init__(self, url: URL) -> None:
        self._engine = create_engine(url)
        self.engine = self._engine.sync_engine
        self._writing = self._engine.execution_options(**{WRITES: True})
        self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    async def run(self, transaction: Transaction[_T], *, writes: bool) -> _T:
        """Run a transaction in this task."""
        async with self._writing.begin() if writes else self._reading.connect() as connection:
            return await connection.run_sync(transaction)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()
