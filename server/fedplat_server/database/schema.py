"""The schema version of a database and of this code, and the upgrade.

A database is usable for code of its own revision, and for older code down to the revision that it names as
`compatible_from`: daemons of two releases share it while they are replaced one by one ("expand and contract", see
`migrations/env.py`).

They use `alembic`, which is configured here: there is no alembic.ini.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from fedplat_server import crash_points, errors
from fedplat_server.database.engine import (
    WRITES,
    async_url,
    check_readable,
    create_engine,
    show,
    sqlite_path,
    translate_errors,
)
from fedplat_server.database.tables import database_identity, schema_compatibility

_MIGRATIONS = Path(__file__).parent / "migrations"
_UPGRADE_LOCK = 0x66656470  # any number that other users of PostgreSQL's advisory locks do not use
LOCK_TIMEOUT_MS = 1000
"""The time that an upgrade of PostgreSQL waits for the lock of a table. Meanwhile all later statements on the table
wait, too, and a leader needs an answer within its lease."""
UPGRADE = "fedplat-server db upgrade"
"""The command, with which messages end; the command line replaces what follows by the options that were given."""
FIRST_RELEASE = "0019"
"""The revision of release 0.1.0, the oldest one that an upgrade begins with."""
MAX_TRIES = 30
_PAUSES_S = (0.5, 2.0)
_GIVES_WAY = frozenset({"55P03", "40P01"})  # lock not available, deadlock


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaState:
    """The revision of a database, None if it is empty, the oldest one whose code may use it, and its id, if known."""

    revision: str | None
    compatible_from: str | None
    database_id: str | None = None


def is_usable(state: SchemaState, code: str) -> bool:
    """Return whether code of a revision may use a database. Revisions are numbers of four digits."""
    if state.revision is None or state.compatible_from is None:
        return state.revision == code
    return state.compatible_from <= code <= state.revision


def config(connection: sqlalchemy.Connection | None = None) -> Config:
    """Return the configuration of alembic; `migrations/env.py` runs on the connection."""
    result = Config()
    result.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    result.attributes["connection"] = connection
    return result


@functools.cache
def head() -> str:
    """Return the revision that this code needs."""
    revision = ScriptDirectory.from_config(config()).get_current_head()
    assert revision is not None
    return revision


def current(database: str) -> str | None:
    """Return the revision of the database at a path or URL; None if it is empty or missing. Not for coroutines."""
    return read_state(database).revision


def read_state(database: str) -> SchemaState:
    """Return the state of the database at a path or URL, which may be empty or missing. Not for coroutines."""
    return asyncio.run(_read(async_url(database)))


def upgrade(database: str) -> str | None:
    """Upgrade the database in one transaction to the revision that this code needs; return its revision.

    Does nothing if it is up to date, or newer and usable for this code. Creates a SQLite file. Raises
    `SchemaVersionError` if a newer fedplat has written the database and this code cannot use it. Not for coroutines.
    """
    with crash_points.step("schema.upgrade"):
        return asyncio.run(_upgrade(async_url(database))).revision


async def _upgrade(url: URL) -> SchemaState:
    path = sqlite_path(url)
    with translate_errors(url):
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite alters a table by copying it, which must not trigger the checks of foreign keys.
        engine = create_engine(url, foreign_keys=False)
        try:
            for _ in range(MAX_TRIES - 1):
                with contextlib.suppress(_LockedError):
                    return await _try_upgrade(engine, url)
                await asyncio.sleep(random.uniform(*_PAUSES_S))
            return await _try_upgrade(engine, url)
        except _LockedError as exc:
            raise errors.StoreUnavailableError(
                f"the database {show(url)} was not changed: other transactions, such as "
                f"those of a backup, kept a table locked during {MAX_TRIES} tries ({exc}); see pg_stat_activity, and "
                "run the upgrade again when they have ended"
            ) from exc
        finally:
            await engine.dispose()


class _LockedError(Exception):
    """Another transaction holds a lock that the upgrade needs."""


async def _try_upgrade(engine: AsyncEngine, url: URL) -> SchemaState:
    try:
        async with engine.execution_options(**{WRITES: True}).begin() as connection:
            if engine.dialect.name == "postgresql":
                # The second of two concurrent upgrades waits, and finds nothing to do.
                await connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
                await connection.execute(sqlalchemy.text(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"))
            return await connection.run_sync(_run, url)
    except DBAPIError as error:
        if getattr(error.orig, "sqlstate", None) not in _GIVES_WAY:
            raise
        raise _LockedError(str(error.orig)) from error


async def require_usable(url: URL) -> None:
    """Raise `SchemaVersionError` unless this code can use the database."""
    state = await _read(url)
    if is_usable(state, head()):
        return
    _refuse_unknown(state, url)
    shown = show(url)
    found = f"is at schema {state.revision}" if state.revision is not None else "is empty"
    check = "check --database (or FEDPLAT_DATABASE); for a new one " if state.revision is None else ""
    raise errors.SchemaVersionError(
        f"the database {shown} {found}; this fedplat needs {head()}: {check}"
        f"run {UPGRADE} --database {_for_command(url)}"
    )


async def _read(url: URL) -> SchemaState:
    path = sqlite_path(url)
    if path is not None and not path.exists():
        if not path.parent.is_dir():
            raise errors.StoreUnavailableError(f"the database {path}: there is no folder {path.parent}")
        return SchemaState(None, None)
    if path is not None:
        check_readable(path)
    with translate_errors(url):
        engine = create_engine(url)
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(_state_of)
        finally:
            await engine.dispose()


def _state_of(connection: sqlalchemy.Connection) -> SchemaState:
    tables = sqlalchemy.inspect(connection)

    def read(table: sqlalchemy.Table) -> str | None:
        found = tables.has_table(table.name)
        return connection.execute(sqlalchemy.select(table)).scalar_one_or_none() if found else None

    revision = MigrationContext.configure(connection).get_current_revision()
    return SchemaState(revision, read(schema_compatibility), read(database_identity))


def _run(connection: sqlalchemy.Connection, url: URL) -> SchemaState:
    found = _state_of(connection)
    if not is_usable(found, head()):
        _refuse_unknown(found, url)
        command.upgrade(config(connection), "head")
        connection.execute(schema_compatibility.delete())
        connection.execute(schema_compatibility.insert().values(compatible_from=read_compatible_from(head())))
    crash_points.point("schema.upgrade.uncommitted")
    return _state_of(connection)


def read_compatible_from(revision: str) -> str:
    """Return the oldest revision whose code can use a database of a revision; see `migrations/env.py`."""
    step = ScriptDirectory.from_config(config()).get_revision(revision)
    assert step is not None
    return str(step.module.compatible_from)


def _refuse_unknown(found: SchemaState, url: URL) -> None:
    if found.revision is None:
        return
    try:
        ScriptDirectory.from_config(config()).get_revision(found.revision)
    except CommandError as exc:
        shown = show(url)
        if found.revision < head():
            raise errors.SchemaVersionError(
                f"the database {shown} is at schema {found.revision}, which belongs to no release, so this version "
                f"cannot upgrade it: first upgrade it with a version that knows this schema (for those before "
                f"{FIRST_RELEASE}: 0.1.0), or begin with a new database"
            ) from exc
        needed = f", for code of {found.compatible_from} or newer" if found.compatible_from else ""
        raise errors.SchemaVersionError(
            f"the database {shown} was written by a newer fedplat "
            f"(schema {found.revision}{needed}; this version has {head()}): install that version or newer"
        ) from exc


def _for_command(url: URL) -> str:
    path = sqlite_path(url)
    return str(path) if path is not None else url.set(drivername="postgresql").render_as_string(hide_password=True)
