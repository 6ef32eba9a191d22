"""The database of a simulation: SQLite under the server's own SQL, with transactions that take simulated time.

A writer waits in simulated time for the one before it. A transaction ends with its process, and after
`engine.ABANDONED_S` if its process is suspended, as PostgreSQL ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar, cast

import sqlalchemy
from greenlet import getcurrent
from sqlalchemy import event, exc
from typing_extensions import override

from fedplat_server import leadership
from fedplat_server.database import engine, store, transactions
from fedplat_server.database.engine import WRITES, async_url, create_blocking_engine, translate_errors
from fedplat_server.database.store import LeaseStore, Store
from fedplat_server.database.tables import leases
from fedplat_server.database.transactions import ThreadedSqlite
from fedplat_server.errors import StoreUnavailableError
from support.fault_simulation.virtual import PROCESS, SimulatedProcess, VirtualLoop

_T = TypeVar("_T")
_TERM = sqlalchemy.select(leases.c.term).where(leases.c.name == store.LEASE_NAME)


class DatabaseServer:
    """What the processes' transactions share: the lock of the writer, and the clock."""

    def __init__(self, loop: VirtualLoop, seed: int, wall: Callable[[], float], happened: Counter[str]) -> None:
        self._loop = loop
        self._wall = wall
        self._rng = random.Random(f"database {seed}")
        self._writer: tuple[Any, SimulatedProcess | None, sqlite3.Connection | None] | None = None
        self._connections: dict[SimulatedProcess, list[sqlite3.Connection]] = {}
        self.happened = happened
        self.reach: Callable[[str], None] = lambda _: None
        self.find: Callable[[str], None] = lambda _: None
        self._terms: dict[SimulatedProcess, int] = {}
        self.is_away: Callable[[SimulatedProcess], bool] = lambda _: False

    def install(self) -> None:
        """Takes over how transactions run in this process."""
        transactions.create_blocking_engine = self._create_engine
        ThreadedSqlite._write = functools.partialmethod(_write, self)  # pyright: ignore
        ThreadedSqlite._read = functools.partialmethod(_read, self, ThreadedSqlite._read)  # pyright: ignore
        leadership.open_leases = self._open_leases
        fence = Store.fence

        async def note_and_fence(store: Store, term: int) -> None:
            process = PROCESS.get()
            assert process is not None
            self._terms[process] = term
            await fence(store, term)

        cast(Any, Store).fence = note_and_fence

    def _create_engine(self, url: sqlalchemy.engine.URL) -> sqlalchemy.Engine:
        made = create_blocking_engine(url)
        process = PROCESS.get()

        def on_connect(connection: sqlite3.Connection, _: object) -> None:
            connection.create_function("julianday", 1, self._julianday)
            if process is not None:
                if process not in self._connections:
                    self._connections[process] = []
                    process.on_death.append(functools.partial(self._on_death, process))
                    process.on_pause.append(functools.partial(self._on_pause, process))
                self._connections[process].append(connection)

        def on_statement(*_: object) -> None:
            if self._rng.random() < 0.1:
                self._loop.block()

        event.listen(made, "connect", on_connect)
        event.listen(made, "before_cursor_execute", on_statement)
        return made

    def _julianday(self, _: object) -> float:
        return self._wall() / 86400.0 + 2440587.5

    @contextlib.contextmanager
    def writing(self) -> Generator[None]:
        """Waits until no other transaction writes."""
        while self._writer is not None:
            self._loop.block(self._rng.uniform(0.001, 0.01))
        me = getcurrent()
        self._writer = (me, PROCESS.get(), None)
        try:
            yield
        finally:
            self._release(me)

    def _release(self, me: object) -> None:
        if self._writer is not None and self._writer[0] is me:  # else it was cut off, and another one writes
            self._writer = None

    def began(self, connection: sqlite3.Connection) -> None:
        """A transaction of the writer has begun."""
        if self._writer is not None:
            self._writer = (*self._writer[:2], connection)

    def check_term(self, connection: sqlalchemy.Connection) -> None:
        """A leader's write that is about to be committed must be in its own term."""
        process = PROCESS.get()
        term = self._terms.get(process) if process is not None else None
        if term is not None and (now := connection.execute(_TERM).scalar_one()) != term:
            self.find(f"a leader of term {term} writes in term {now}")

    def _on_death(self, process: SimulatedProcess) -> None:
        for connection in self._connections.pop(process):
            connection.close()
        if self._writer is not None and self._writer[1] is process:
            self.happened["transactions cut off by a crash"] += 1
            self._writer = None

    def _on_pause(self, process: SimulatedProcess, until: float) -> None:
        if self._writer is not None and self._writer[1] is process:
            self._loop.call_later(engine.ABANDONED_S, self._abandon, self._writer, until)

    def _abandon(self, writer: tuple[Any, SimulatedProcess | None, sqlite3.Connection | None], until: float) -> None:
        current = self._writer
        if current is not None and current[0] is writer[0] and self._loop.time() < until:
            self.happened["transactions abandoned in a pause"] += 1
            if current[2] is not None:
                current[2].rollback()
            said = sqlite3.OperationalError("the server has ended an idle transaction")
            current[0].abandoned = exc.OperationalError("", None, said)
            self._writer = None

    async def _open_leases(self, database: str, timeout_s: float = store.LEASE_TIMEOUT_S) -> LeaseStore:
        process = PROCESS.get()
        assert process is not None
        return _Leases(self, process, self._create_engine(async_url(database)), timeout_s)


def _write(self: ThreadedSqlite, server: DatabaseServer, transaction: Callable[[Any], _T]) -> _T:
    """Stands in for `ThreadedSqlite._write`."""

    def run(connection: sqlalchemy.Connection) -> _T:
        result = transaction(connection)
        server.check_term(connection)
        return result

    return _run(server, self._writing, run)  # pyright: ignore[reportPrivateUsage]


def _read(
    self: ThreadedSqlite, server: DatabaseServer, read: Callable[..., _T], transaction: Callable[[Any], _T]
) -> _T:
    """Stands in for `ThreadedSqlite._read`."""
    result = read(self, transaction)
    server.reach("database.read.after")
    return result


def _run(server: DatabaseServer, writing: sqlalchemy.Engine, transaction: Callable[[Any], _T]) -> _T:
    with server.writing(), writing.begin() as connection:
        server.began(connection.connection.driver_connection)  # pyright: ignore
        server.reach("database.write.begun")
        result = transaction(connection)
        server.reach("database.write.uncommitted")
    server.reach("database.write.after")
    return result


class _Leases(LeaseStore):
    """The lease, with transactions in threads of the simulation."""

    def __init__(
        self, server: DatabaseServer, process: SimulatedProcess, made: sqlalchemy.Engine, timeout_s: float
    ) -> None:
        self._server, self._process, self._timeout_s = server, process, timeout_s
        self._engine: Any = made
        self._writing: Any = made.execution_options(**{WRITES: True})

    @override
    async def close(self) -> None:
        self._engine.dispose()

    @override
    async def _run(self, engine: Any, transaction: Callable[[Any], Awaitable[_T]]) -> _T:
        if self._server.is_away(self._process):
            await asyncio.sleep(self._timeout_s)
            raise StoreUnavailableError("the database does not answer, says the simulation")
        with translate_errors(self._engine.url):
            return await asyncio.get_running_loop().run_in_executor(None, self._drive, engine, transaction)

    def _drive(self, engine: Any, transaction: Callable[[Any], Any]) -> Any:
        def run(connection: sqlalchemy.Connection) -> Any:
            return _complete(transaction(_Awaited(connection)))

        if engine is self._writing:
            return _run(self._server, engine, run)
        with engine.connect() as connection:
            return run(connection)


class _Awaited:
    """A connection whose statements are awaited."""

    def __init__(self, connection: sqlalchemy.Connection) -> None:
        self._connection = connection
        self.dialect = connection.dialect

    async def execute(self, statement: sqlalchemy.Executable) -> Any:
        return self._connection.execute(statement)


def _complete(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a transaction waits for something")
