"""Runs transactions: queued, run to their end, retried after conflicts, with errors translate_errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import event

from fedplat_server.database.drivers import Transactions, Work
from fedplat_server.database.engine import NUM_READERS, ConflictError, num_writers, translate_errors
from fedplat_server.errors import LeadershipLostError

MAX_TRIES = 5
"""Maximum number of tries of a transaction that the database rolls back because of another one."""

Clock = Callable[[], float]
"""Returns the seconds since 1970 on the wall clock."""

_T = TypeVar("_T")


class Database:
    """Runs work in transactions.

    A transaction runs to its end even if its caller is cancelled, as RPC handlers are whenever a client hangs up; the
    caller then gets its `CancelledError`. To abort it would cost the connection, and leave a lock of SQLite behind for
    a while.
    """

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        engine = transactions.engine
        self.dialect = engine.dialect.name
        """Kind of the database: sqlite or postgresql."""
        # Callers queue here: SQLite's busy handler is unfair, and the pool times out.
        self._readers = asyncio.Semaphore(NUM_READERS)
        self._writers = asyncio.Semaphore(num_writers(engine.url))
        self._running: set[asyncio.Task[Any]] = set()
        self._connections: set[Any] = set()  # of the driver, as SQLAlchemy wraps them
        self._fence: Work[None] | None = None
        self._is_severed = False

        def on_connect(connection: Any, _: object) -> None:
            self._connections.add(connection)

        def on_close(connection: Any, _: object) -> None:
            self._connections.discard(connection)

        event.listen(engine, "connect", on_connect)
        event.listen(engine, "close", on_close)

    async def close(self) -> None:
        """Wait for the transactions that still run and close all connections."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._transactions.close()

    def fence(self, check: Work[None]) -> None:
        """Begin every later write transaction with a check, which raises to refuse it."""
        self._fence = check

    def sever(self) -> None:
        """Abort every transaction and connection at once, without waiting for the database."""
        self._is_severed = True
        for connection in self._connections:
            if hasattr(connection.driver_connection, "terminate"):  # one of SQLite never hangs
                connection.driver_connection.terminate()
        for task in self._running:
            task.cancel()

    async def read(self, work: Work[_T]) -> _T:
        """Run work that only reads, on one snapshot."""
        return await self._run_to_end(self._readers, self._read, work)

    async def fetch(self, query: sqlalchemy.Executable) -> Sequence[sqlalchemy.Row[Any]]:
        """Return the rows of a query."""
        return await self.read(lambda connection: connection.execute(query).all())

    async def write(self, work: Work[_T]) -> _T:
        """Run work in a transaction, and again if the database rolled it back because of another one."""
        for tries in range(1, MAX_TRIES):
            try:
                return await self._run_to_end(self._writers, self._write, work)
            except ConflictError:
                await asyncio.sleep(random.uniform(0.0, 0.01 * 2**tries))
        return await self._run_to_end(self._writers, self._write, work)

    async def _read(self, work: Work[_T]) -> _T:
        with translate_errors(self._transactions.engine.url):
            return await self._transactions.run(work, writes=False)

    async def _write(self, work: Work[_T]) -> _T:
        fence = self._fence

        def work_fenced(connection: sqlalchemy.Connection) -> _T:
            if fence is not None:
                fence(connection)
            return work(connection)

        with translate_errors(self._transactions.engine.url):
            return await self._transactions.run(work_fenced, writes=True)

    async def _run_to_end(
        self, queue: asyncio.Semaphore, run: Callable[[Work[_T]], Awaitable[_T]], work: Work[_T]
    ) -> _T:
        await queue.acquire()

        async def running() -> _T:
            try:
                if not self._is_severed:
                    return await run(work)
            except asyncio.CancelledError:
                if not self._is_severed:
                    raise
            finally:
                queue.release()
            raise LeadershipLostError("this daemon no longer leads")

        task = asyncio.create_task(running())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise
