"""How a transaction reaches its database: in a thread, all of it in one visit, or on the event loop.

Work is a plain function on a connection of SQLAlchemy, whichever way it goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import sqlalchemy
from sqlalchemy.engine import URL

from fedplat_server.store.engine import NUM_READERS, WRITES, create_blocking_engine, create_engine, num_writers

_T = TypeVar("_T")
Work = Callable[[sqlalchemy.Connection], _T]


class Transactions(Protocol):
    """Runs work in transactions on one database. Errors are SQLAlchemy's."""

    @property
    def engine(self) -> sqlalchemy.Engine:
        """Whose connections are used; for its events, its dialect and its URL."""
        ...

    async def run(self, work: Work[_T], *, writes: bool) -> _T:
        """Runs work and commits it if it `writes`; else all of its queries see one snapshot."""
        ...

    async def close(self) -> None:
        """Waits for what is under way, and lets go of every connection."""
        ...


def to(url: URL) -> Transactions:
    """The way to the database at a URL of `engine.async_url`, whose tables are there."""
    return Threads(url) if url.get_backend_name() == "sqlite" else Loop(url)


class Threads:
    """SQLite, in one visit to a thread for each transaction.

    An asynchronous driver makes one for each step of each statement, which costs more than what the database does.
    """

    def __init__(self, url: URL) -> None:
        self.engine = create_blocking_engine(url)
        self._writing = self.engine.execution_options(**{WRITES: True})
        self._threads = ThreadPoolExecutor(NUM_READERS + num_writers(url), thread_name_prefix="database")

    async def run(self, work: Work[_T], *, writes: bool) -> _T:
        """In a thread; goes on to its end there, whatever becomes of the task that waits."""
        visit = self._write if writes else self._read
        return await asyncio.get_running_loop().run_in_executor(self._threads, visit, work)

    async def close(self) -> None:
        """Waits in a thread of another pool: SQLite may be waiting for another process."""
        await asyncio.to_thread(self._threads.shutdown)
        self.engine.dispose()

    def _write(self, work: Work[_T]) -> _T:
        with self._writing.begin() as connection:
            return work(connection)

    def _read(self, work: Work[_T]) -> _T:
        with self.engine.connect() as connection:
            return work(connection)


class Loop:
    """PostgreSQL, which answers over a socket."""

    def __init__(self, url: URL) -> None:
        self._engine = create_engine(url)
        self.engine = self._engine.sync_engine
        self._writing = self._engine.execution_options(**{WRITES: True})
        self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    async def run(self, work: Work[_T], *, writes: bool) -> _T:
        """In this task."""
        async with self._writing.begin() if writes else self._reading.connect() as connection:
            return await connection.run_sync(work)

    async def close(self) -> None:
        """Closes what the pool has."""
        await self._engine.dispose()
