"""The execution of transactions: queued, run to their end, retried after conflicts; lists and batches of keys.

For both databases, a transaction is a plain function of a connection of SQLAlchemy.

A list of keys is a table to join: neither database uses an index for a long list of tuples.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import sqlalchemy
from sqlalchemy import FromClause, Integer, String, column, event, func, select
from sqlalchemy.engine import URL

from fedplat.rounds import AttemptKey
from fedplat_server.database.engine import (
    NUM_READERS,
    WRITES,
    create_blocking_engine,
    create_engine,
    num_writers,
    translate_errors,
)
from fedplat_server.errors import ConflictError, LeadershipLostError, StoreUnavailableError
from fedplat_server.instruments import Instruments

MAX_TRIES = 5
"""Maximum number of tries for a transaction that conflicts with another one."""

_APPENDED = "fedplat.appended"


@dataclasses.dataclass
class AppendedRows:
    """The rows that a write transaction appends: the number of events, and the actions of audit entries."""

    num_events: int = 0
    audit_actions: list[str] = dataclasses.field(default_factory=list[str])


def appended_rows(connection: sqlalchemy.Connection) -> AppendedRows:
    """Return the record of the transaction in progress, which `Database` reads after the commit."""
    return connection.info.setdefault(_APPENDED, AppendedRows())


Clock = Callable[[], float]
"""A function that returns the seconds since 1970 on the wall clock."""

_T = TypeVar("_T")


class Database:
    """A database with queues for its transactions.

    A transaction runs to its end even if its caller is cancelled, as RPC handlers are when a client disconnects; the
    caller then gets its `CancelledError`. Aborting the transaction would cost the connection, and would leave a lock of
    SQLite for a while.
    """

    def __init__(self, transactions: Transactions, instruments: Instruments | None = None) -> None:
        self._transactions = transactions
        instruments = instruments or Instruments()
        self._read_duration = instruments.database_duration.labels("read")
        self._write_duration = instruments.database_duration.labels("write")
        self._audit_events = instruments.audit_events
        engine = transactions.engine
        self.dialect = engine.dialect.name
        """The kind of the database: sqlite or postgresql."""
        # Callers queue here: SQLite's busy handler is unfair, and SQLAlchemy's pool of connections has a timeout.
        self._readers = asyncio.Semaphore(NUM_READERS)
        self._writers = asyncio.Semaphore(num_writers(engine.url))
        self._running: set[asyncio.Task[Any]] = set()
        self._connections: set[Any] = set()  # of the driver, as SQLAlchemy wraps them
        self._fence: Transaction[None] | None = None
        self._is_severed = False
        self._next_append = asyncio.Event()

        def on_connect(connection: Any, _: object) -> None:
            self._connections.add(connection)

        def on_close(connection: Any, _: object) -> None:
            self._connections.discard(connection)

        event.listen(engine, "connect", on_connect)
        event.listen(engine, "close", on_close)

    def next_append(self) -> asyncio.Event:
        """Return an event that is set after the next commit of this process that appends events."""
        return self._next_append

    async def close(self) -> None:
        """Wait for running transactions and close all connections."""
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._transactions.close()

    def fence(self, check: Transaction[None]) -> None:
        """Begin every later write transaction with a check, which raises an error to refuse it."""
        self._fence = check

    def sever(self) -> None:
        """Abort every transaction and connection at once, without waiting for the database."""
        self._is_severed = True
        for connection in self._connections:
            driver = getattr(connection, "driver_connection", connection)
            if hasattr(driver, "terminate"):  # connections of SQLite never hang
                driver.terminate()
        for task in self._running:
            # Not at once: a task that is cancelled before its first step never runs, and would keep its place in the
            # queue. By then it has begun, or has seen that it must not.
            task.get_loop().call_soon(task.cancel)

    async def read(self, transaction: Transaction[_T]) -> _T:
        """Run a transaction that only reads, on one snapshot."""
        with self._read_duration.time():
            return await self._run_to_end(self._readers, self._read, transaction)

    async def fetch(self, query: sqlalchemy.Executable) -> Sequence[sqlalchemy.Row[Any]]:
        """Return the rows of a query."""
        return await self.read(lambda connection: connection.execute(query).all())

    async def write(self, transaction: Transaction[_T]) -> _T:
        """Run a transaction that writes; repeat it if the database rolls it back because of a conflict."""
        with self._write_duration.time():
            for tries in range(1, MAX_TRIES):
                try:
                    return await self._run_to_end(self._writers, self._write, transaction)
                except ConflictError:
                    await asyncio.sleep(random.uniform(0.0, 0.01 * 2**tries))
            return await self._run_to_end(self._writers, self._write, transaction)

    async def _read(self, transaction: Transaction[_T]) -> _T:
        with translate_errors(self._transactions.engine.url):
            return await self._transactions.run(transaction, writes=False)

    async def _write(self, transaction: Transaction[_T]) -> _T:
        fence, rows = self._fence, AppendedRows()

        def run_fenced(connection: sqlalchemy.Connection) -> _T:
            connection.info[_APPENDED] = rows
            if fence is not None:
                fence(connection)
            return transaction(connection)

        with translate_errors(self._transactions.engine.url):
            result = await self._transactions.run(run_fenced, writes=True)
        if rows.num_events:
            self._next_append.set()
            self._next_append = asyncio.Event()
        for action in rows.audit_actions:
            self._audit_events.labels(action).inc()
        return result

    async def _run_to_end(
        self, queue: asyncio.Semaphore, run: Callable[[Transaction[_T]], Awaitable[_T]], transaction: Transaction[_T]
    ) -> _T:
        await queue.acquire()

        async def running() -> _T:
            try:
                if not self._is_severed:
                    return await run(transaction)
            except asyncio.CancelledError:
                if not self._is_severed:
                    raise
            finally:
                queue.release()
            raise LeadershipLostError("this daemon no longer leads")

        task = asyncio.create_task(running())
        self._running.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may be gone: asyncio would log that the error was never retrieved


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


def driver_for_url(url: URL) -> Transactions:
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


def json_strings(dialect: str, values: Collection[str]) -> sqlalchemy.Select[Any]:
    """Return a query for these strings."""
    as_json = json.dumps(list(values))
    if dialect == "postgresql":
        return select(func.json_array_elements_text(_json(as_json)).column_valued("value"))
    return select(func.json_each(as_json).table_valued("value").c.value)


@functools.cache
def json_attempt_keys(dialect: str) -> FromClause:
    """Return a table of keys, with the columns job_id, round and number: those of the parameters `key_values`."""
    keys = sqlalchemy.bindparam("keys", type_=sqlalchemy.Text)
    if dialect == "postgresql":
        columns = (column("job_id", String), column("round", Integer), column("number", Integer))
        table = func.json_to_recordset(_json(keys)).table_valued(*columns)
        return table.render_derived(name="keys", with_types=True)
    each = func.json_each(keys).table_valued("value")
    names = AttemptKey._fields
    parts = [func.json_extract(each.c.value, f"$.{name}").label(name) for name in names]
    return select(*parts).subquery("keys")


def json_key_values(keys: Collection[AttemptKey]) -> dict[str, str]:
    """Return the parameters of a query on `attempt_keys`."""
    return {"keys": json.dumps([key._asdict() for key in keys])}


def _json(text: Any) -> sqlalchemy.Cast[Any]:
    return sqlalchemy.cast(sqlalchemy.cast(text, sqlalchemy.Text), sqlalchemy.JSON)


_Value = TypeVar("_Value")


class BatchLoader(Generic[_Value]):
    """A loader of values by key, which combines concurrent calls.

    A transaction takes a millisecond, and hardly more for five hundred clients. So many clients that return after a
    restart are admitted about ten times as fast, and a single one does not wait for others. `fetch` returns the values
    of up to `max_keys` keys and leaves out unknown ones. The keys of one call are distinct: equal keys of several
    callers are fetched in several calls.
    """

    def __init__(self, fetch: Callable[[Sequence[str]], Awaitable[Mapping[str, _Value]]], max_keys: int = 500) -> None:
        self._fetch = fetch
        self._max_keys = max_keys
        self._waiting: list[tuple[str, asyncio.Future[_Value | None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def load(self, key: str) -> _Value | None:
        """Return the value of a key; None if it is unknown. Raises the errors of `fetch`."""
        answer: asyncio.Future[_Value | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, answer))
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="batch loader")
        return await answer

    async def _run(self) -> None:
        try:
            while batch := self._next():
                await self._answer(batch)
        finally:
            self._task = None

    def _next(self) -> dict[str, asyncio.Future[_Value | None]]:
        batch: dict[str, asyncio.Future[_Value | None]] = {}
        later: list[tuple[str, asyncio.Future[_Value | None]]] = []
        for key, answer in self._waiting:
            if answer.cancelled():
                continue
            if key in batch or len(batch) == self._max_keys:
                later.append((key, answer))
            else:
                batch[key] = answer
        self._waiting = later
        return batch

    async def _answer(self, batch: Mapping[str, asyncio.Future[_Value | None]]) -> None:
        try:
            values = await self._fetch(list(batch))
        except Exception as exc:  # a task boundary: each caller gets its own error
            if len(batch) > 1 and not isinstance(exc, StoreUnavailableError | LeadershipLostError):
                # The database answers, so one key is the cause: only its caller may get the error.
                for key, answer in batch.items():
                    await self._answer({key: answer})
                return
            for answer in batch.values():
                if not answer.done():
                    answer.set_exception(type(exc)(*exc.args))
        else:
            for key, answer in batch.items():
                if not answer.done():
                    answer.set_result(values.get(key))
