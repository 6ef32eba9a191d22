"""Database URLs, engines, and the one place that translates errors of SQLAlchemy and its drivers."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import random
import re
import shutil
import sqlite3
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import aiosqlite
import sqlalchemy
from sqlalchemy import event, exc
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.util import immutabledict

from fedplat.extras import install_command
from fedplat_server.errors import ConfigError, ConflictError, StoreError, StoreFullError, StoreUnavailableError
from fedplat_server.instruments import note_full

WRITES = "fedplat_writes"
"""The execution option of connections for transactions that write."""

BUSY_TIMEOUT_S = 30
"""The time that SQLite waits for another process that writes."""

CONNECT_TIMEOUT_S = 10
COMMAND_TIMEOUT_S = 60
ABANDONED_S = 4
"""The time after which PostgreSQL ends an idle transaction, so that a suspended daemon does not keep its locks.

It does not end one in the middle of a statement; see `sql_leases`.
"""

NUM_READERS = 4
"""The number of concurrent transactions that read. More would not be faster on one core."""

_EXPECTED = "expected a path, sqlite:///path or postgresql://user:password@host/database"
_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+pysqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}
_PLACE = ("host", "port")
"""Parameters of a URL that name the place of a database, such as the folder of a socket."""
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
"""Parameters of a URL that name a file."""
# Classes of SQLSTATE: connection lost, out of resources (disk, memory, connections), shut down, system error.
_UNAVAILABLE = re.compile(r"08...|53...|57P..|58...")
_CONFLICTS = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_OPTION = "--database (or FEDPLAT_DATABASE)"
_ADVICE = {
    "28000": f"correct the user in {_OPTION}, create it (createuser), or let pg_hba.conf accept it",
    "28P01": f"correct the user or the password in {_OPTION}, or in PGPASSFILE",
    "3D000": f"create it (createdb), or correct the name in {_OPTION}",
    "42501": "make the user the owner of the database (ALTER DATABASE ... OWNER TO ...), which may create tables",
    "42704": f"correct the parameters after the ? in {_OPTION}",
    sqlite3.SQLITE_READONLY: "let the user of the server write the file and its folder",
    sqlite3.SQLITE_IOERR: "check its disk",
    sqlite3.SQLITE_CORRUPT: f"restore it from a backup, or correct {_OPTION}",
    sqlite3.SQLITE_CANTOPEN: "let the user of the server read and write the file and its folder",
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_NOTADB: f"restore it from a backup, or correct {_OPTION}",
}
"""What to do about an error, by SQLSTATE or the primary code of SQLite."""
FULL_BYTES = 1 << 16
"""Free space below which SQLite fails with an I/O error: its shared memory is a file of 32 KiB beside the database."""
_DISK_FULL = "53100"
# 1: an error in the SQL; 11: damaged; 26: not a database. The other codes of sqlite3.OperationalError may be temporary.
_SQLITE_PERMANENT = frozenset({1, 11, 26})


def async_url(database: str) -> URL:
    """Return the URL of the asynchronous driver for a path or a URL of any driver. Raises `ConfigError`."""
    if "://" not in database:
        if not database.strip() or database == ":memory:":
            raise ConfigError(f"database {database!r}: {_EXPECTED}")
        return URL.create("sqlite+aiosqlite", database=database)
    try:
        url = make_url(database)
    except (exc.ArgumentError, ValueError) as error:
        # The URL is not shown: it may contain a password in an unknown place.
        raise ConfigError(f"the database's URL cannot be read: {_EXPECTED}") from error
    driver = _DRIVERS.get(url.drivername)
    shown = url.render_as_string(hide_password=True)
    if driver is None:
        raise ConfigError(f"database {shown}: {url.drivername} is not supported; {_EXPECTED}")
    if driver == "sqlite+aiosqlite" and (not url.database or url.database == ":memory:"):
        raise ConfigError(f"database {shown} names no file; {_EXPECTED}")
    return (_check_postgres(url) if driver == "postgresql+asyncpg" else url).set(drivername=driver)


def _check_postgres(url: URL) -> URL:
    """Return a URL of PostgreSQL with the parameters of asyncpg. Raises `ConfigError`."""
    if importlib.util.find_spec("asyncpg") is None:
        raise ConfigError(f"PostgreSQL needs a driver: {install_command('postgres', 'fedplat-server')}")
    for name in _FILES:
        if isinstance(path := url.query.get(name), str) and not Path(path).is_file():
            raise ConfigError(f"database {show(url)}: {name}={path} is no file; correct the path, or leave it out")
    if sslmode := url.query.get("sslmode"):  # the name in libpq
        url = url.difference_update_query(["sslmode"]).update_query_dict({"ssl": sslmode})
    return url


def describe(database: str) -> str:
    """Return a database's URL without a password."""
    url = async_url(database)
    return url._replace(drivername=url.get_backend_name(), password=None, query=immutabledict()).render_as_string()


def show(url: URL) -> str:
    """Return a URL for a message: as an operator writes it, without passwords and parameters but the place."""
    place = {name: url.query[name] for name in _PLACE if name in url.query}
    return url._replace(drivername=url.get_backend_name(), query=immutabledict(place)).render_as_string()


def sqlite_path(url: URL) -> Path | None:
    """Return the file of a SQLite database; None for PostgreSQL."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def check_readable(path: Path) -> None:
    """Raise `StoreUnavailableError` with the reason if the file of a SQLite database is there and cannot be opened."""
    try:
        with path.open("rb"):
            return
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreUnavailableError(
            f"the database {path} cannot be opened ({error.strerror}): let the user of the server read and write it, "
            f"or correct {_OPTION}"
        ) from error


def num_writers(url: URL) -> int:
    """Return the number of concurrent transactions that write."""
    return 1 if url.get_backend_name() == "sqlite" else 4


def create_engine(url: URL, *, foreign_keys: bool = True, timeout_s: float | None = None) -> AsyncEngine:
    """Return an engine for a URL of `async_url`, without connecting. Migrations of SQLite need `foreign_keys` off.

    `timeout_s` is the time limit of PostgreSQL to connect and to answer, instead of the defaults.
    """
    pool = {"pool_size": NUM_READERS + num_writers(url), "max_overflow": 0, "json_serializer": _to_json}
    if url.get_backend_name() == "postgresql":
        url, dsn = _split_parameters(url)
        options = {
            "dsn": dsn,
            "timeout": timeout_s or CONNECT_TIMEOUT_S,
            "command_timeout": timeout_s or COMMAND_TIMEOUT_S,
            "server_settings": {"idle_in_transaction_session_timeout": f"{ABANDONED_S}s"},
        }
        return create_async_engine(url, pool_pre_ping=True, connect_args=options, **pool)
    engine = create_async_engine(url, **pool)
    _set_up_sqlite(engine.sync_engine, foreign_keys)

    def on_connect(connection: Any, _: object) -> None:
        connection.run_async(_use_wal)

    event.listen(engine.sync_engine, "connect", on_connect)
    return engine


def _split_parameters(url: URL) -> tuple[URL, str]:
    """Return a URL with the parameters that SQLAlchemy reads, and one with the others, for asyncpg.

    asyncpg reads those of libpq, such as `sslrootcert`, from a URL only; what it does not know are settings of the
    server, which refuses unknown ones.
    """
    others = [name for name in url.query if name not in (*_PLACE, "ssl") and not name.startswith("prepared_statement_")]
    query = {name: url.query[name] for name in others}
    dsn = URL.create("postgresql", query=query).render_as_string() if others else ""
    return url.difference_update_query(others), dsn


def create_blocking_engine(url: URL) -> sqlalchemy.Engine:
    """Return an engine for a SQLite database that `create_engine` was used for before, which switches it to WAL."""
    pool = {"pool_size": NUM_READERS + num_writers(url), "max_overflow": 0, "json_serializer": _to_json}
    engine = sqlalchemy.create_engine(url.set(drivername="sqlite"), **pool)
    _set_up_sqlite(engine, foreign_keys=True)
    return engine


# With escapes, texts of clients would be up to three times as long.
_JSON = json.JSONEncoder(ensure_ascii=False)


def _to_json(value: Any) -> str:
    return "{}" if value == {} else _JSON.encode(value)  # most assignments and rows of the history have no metrics


def _set_up_sqlite(engine: sqlalchemy.Engine, foreign_keys: bool) -> None:
    def on_connect(connection: Any, _: object) -> None:
        # By default the driver begins a transaction late, and never for a SELECT: then there is no snapshot, and a
        # transaction that first reads and then writes fails with "database is locked". See "Transactions with SQLite"
        # in SQLAlchemy's documentation.
        connection.isolation_level = None
        cursor = connection.cursor()
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_S * 1000}",
            "synchronous = FULL",
            f"foreign_keys = {'ON' if foreign_keys else 'OFF'}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    def on_begin(connection: sqlalchemy.Connection) -> None:
        writes = connection.get_execution_options().get(WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


async def _use_wal(connection: aiosqlite.Connection) -> None:
    """Switch the file permanently to a write-ahead log, with which readers never wait for the writer."""
    # If two processes open a new file at once, SQLite refuses one of them whatever its busy_timeout, because waiting
    # for the lock could be a deadlock.
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            await connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        await asyncio.sleep(random.uniform(0.005, 0.05))


@contextlib.contextmanager
def translate_errors(url: URL) -> Generator[None]:
    """Translate the exceptions of database libraries into errors of the store."""
    try:
        yield
    except exc.DBAPIError as error:
        raise _translate(error, url) from error
    except (exc.TimeoutError, TimeoutError, OSError) as error:
        raise StoreUnavailableError(
            f"the database {show(url)} does not answer ({error}): start it, or correct {_OPTION}"
        ) from error
    except exc.SQLAlchemyError as error:
        raise StoreError(f"the database {show(url)} refused: {error}") from error


def _translate(error: exc.DBAPIError, url: URL) -> StoreError:
    # Without the statement and its parameters, which SQLAlchemy adds to its own message.
    sqlstate = getattr(error.orig, "sqlstate", None)
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_IOERR and _is_disk_full(url):
        code = sqlite3.SQLITE_FULL
    message = f"error of the database {show(url)}: {error.orig}"
    if advice := _ADVICE.get(sqlstate or code):
        message += f"; {advice}"
    if sqlstate in _CONFLICTS:
        return ConflictError(message)
    if sqlstate == _DISK_FULL or code == sqlite3.SQLITE_FULL:
        note_full("database")
        return StoreFullError(message)
    if error.connection_invalidated or (sqlstate is not None and _UNAVAILABLE.fullmatch(sqlstate)):
        return StoreUnavailableError(message)
    if isinstance(error.orig, sqlite3.OperationalError):
        return StoreError(message) if code in _SQLITE_PERMANENT else StoreUnavailableError(message)
    # asyncpg's InterfaceError also covers values that it cannot encode, for which a retry is useless.
    if isinstance(error, exc.InterfaceError) and "connection" in str(error.orig):
        return StoreUnavailableError(message)
    return StoreError(message)


def _is_disk_full(url: URL) -> bool:
    path = sqlite_path(url)
    with contextlib.suppress(OSError):
        return path is not None and shutil.disk_usage(path.parent).free < FULL_BYTES
    return False
