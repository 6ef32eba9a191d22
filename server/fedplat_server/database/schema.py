"""The schema version of a database and of this code, and the upgrade.

They use `alembic`, which is configured here: there is no alembic.ini.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.engine import URL

from fedplat_server import crash_points
from fedplat_server.database.engine import WRITES, async_url, create_engine, sqlite_path, translate_errors
from fedplat_server.errors import SchemaVersionError, StoreUnavailableError

_MIGRATIONS = Path(__file__).parent / "migrations"
_UPGRADE_LOCK = 0x66656470  # any number that other users of PostgreSQL's advisory locks do not use


def config(connection: sqlalchemy.Connection | None = None) -> Config:
    """Return the configuration of alembic; `migrations/env.py` runs on the connection."""
    result = Config()
    result.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    result.attributes["connection"] = connection
    return result


def head() -> str:
    """Return the revision that this code needs."""
    revision = ScriptDirectory.from_config(config()).get_current_head()
    assert revision is not None
    return revision


def current(database: str) -> str | None:
    """Return the revision of the database at a path or URL; None if it is empty or missing. Not for coroutines."""
    return asyncio.run(_current(async_url(database)))


def upgrade(database: str) -> str:
    """Upgrade the database in one transaction to the revision that this code needs; return that revision.

    Does nothing if it is up to date. Creates a SQLite file. Raises `SchemaVersionError` if a newer fedplat has written
    the database. Not for coroutines.
    """
    with crash_points.step("schema.upgrade"):
        asyncio.run(_upgrade(async_url(database)))
    return head()


async def _upgrade(url: URL) -> None:
    path = sqlite_path(url)
    with translate_errors(url):
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite alters a table by copying it, which must not trigger the checks of foreign keys.
        engine = create_engine(url, foreign_keys=False)
        try:
            async with engine.execution_options(**{WRITES: True}).begin() as connection:
                if path is None:
                    # The second of two concurrent upgrades waits, and finds nothing to do.
                    await connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
                await connection.run_sync(_run, url)
        finally:
            await engine.dispose()


async def require_head(url: URL) -> None:
    """Raise `SchemaVersionError` if the database is not at the revision that this code needs."""
    found = await _current(url)
    if found == head():
        return
    _refuse_newer(found, url)
    shown = url.render_as_string(hide_password=True)
    state = f"is at schema {found}" if found is not None else "is empty"
    raise SchemaVersionError(
        f"the database {shown} {state}; this fedplat needs {head()}: "
        f"run fedplat-server db upgrade --database {_for_command(url)}"
    )


async def _current(url: URL) -> str | None:
    path = sqlite_path(url)
    if path is not None and not path.exists():
        if not path.parent.is_dir():
            raise StoreUnavailableError(f"the database {path}: there is no folder {path.parent}")
        return None
    with translate_errors(url):
        engine = create_engine(url)
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(lambda sync: MigrationContext.configure(sync).get_current_revision())
        finally:
            await engine.dispose()


def _run(connection: sqlalchemy.Connection, url: URL) -> None:
    _refuse_newer(MigrationContext.configure(connection).get_current_revision(), url)
    command.upgrade(config(connection), "head")
    crash_points.point("schema.upgrade.uncommitted")


def _refuse_newer(found: str | None, url: URL) -> None:
    if found is None:
        return
    try:
        ScriptDirectory.from_config(config()).get_revision(found)
    except CommandError as exc:
        raise SchemaVersionError(
            f"the database {url.render_as_string(hide_password=True)} was written by a newer fedplat "
            f"(schema {found}; this version supports up to {head()}): install that version or newer"
        ) from exc


def _for_command(url: URL) -> str:
    path = sqlite_path(url)
    return str(path) if path is not None else url.set(drivername="postgresql").render_as_string(hide_password=True)
