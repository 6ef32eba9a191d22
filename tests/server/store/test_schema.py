"""The way from an empty database to the schema of this version, and what other versions are told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import sqlite3
import threading
from pathlib import Path

import pytest
import sqlalchemy
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.engine import URL

from fedplat_server.database import engine as engine_module
from fedplat_server.database import rows, schema, tables
from fedplat_server.database.engine import async_url, create_engine
from fedplat_server.database.store import open_store
from fedplat_server.errors import ConfigError, SchemaVersionError, StoreUnavailableError


async def _run(database: str, *statements: str) -> None:
    engine = create_engine(async_url(database))
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


def test_each_number_of_an_attempt_has_its_column() -> None:
    """All other columns are its key, its times, and when its history was removed."""
    others = {"job_id", "round", "number", "opened_unix_s", "ended_unix_s", "history_removed_unix_s"}
    assert set(tables.attempts.c.keys()) == {*rows.ATTEMPT_COLUMNS} | others


def test_an_upgrade_leads_to_the_head_and_may_be_repeated(empty_database: str) -> None:
    assert schema.current(empty_database) is None
    assert schema.upgrade(empty_database) == schema.head()
    assert schema.upgrade(empty_database) == schema.current(empty_database) == schema.head()


async def test_the_migrations_make_the_tables_that_the_code_uses(database: str) -> None:
    def differences(connection: sqlalchemy.Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, tables.metadata))

    engine = create_engine(async_url(database))
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


def _shape(connection: sqlalchemy.Connection) -> dict[str, object]:
    """What a database says of its tables, without the order of constraints."""
    inspector = sqlalchemy.inspect(connection)
    return {
        table.name: (
            [(c["name"], str(c["type"]), c["nullable"], c.get("default")) for c in inspector.get_columns(table.name)],
            inspector.get_pk_constraint(table.name),
            sorted((c["name"] or "", tuple(c["column_names"])) for c in inspector.get_unique_constraints(table.name)),
            sorted((c["name"] or "", c["referred_columns"]) for c in inspector.get_foreign_keys(table.name)),
            sorted((i["name"] or "", i["column_names"], i["unique"]) for i in inspector.get_indexes(table.name)),
        )
        for table in tables.metadata.sorted_tables
    }


async def test_the_migrations_make_the_same_as_the_metadata(database: str) -> None:
    """Stricter than alembic's comparison, which overlooks primary keys and defaults."""

    def shapes(connection: sqlalchemy.Connection) -> tuple[object, object]:
        migrated = _shape(connection)
        tables.metadata.drop_all(connection)
        tables.metadata.create_all(connection)
        return migrated, _shape(connection)

    engine = create_engine(async_url(database))
    async with engine.begin() as connection:
        migrated, created = await connection.run_sync(shapes)
        await connection.rollback()
    await engine.dispose()
    assert migrated == created


def test_two_may_upgrade_at_once(empty_database: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        heads = list(pool.map(schema.upgrade, [empty_database] * 4))
    assert heads == [schema.head()] * 4


def test_a_new_file_that_another_writes_to_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite refuses the change to a write-ahead log at once, whatever its busy_timeout, while another writes."""
    refused = threading.Event()

    class Waits:
        @staticmethod
        def uniform(low: float, high: float) -> float:
            refused.set()
            return low

    monkeypatch.setattr(engine_module, "random", Waits)
    path = tmp_path / "fedplat.db"
    with (
        contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        other.execute("BEGIN IMMEDIATE")
        upgrade = pool.submit(schema.upgrade, str(path))
        assert refused.wait(60)
        other.execute("COMMIT")
        assert upgrade.result() == schema.head()


async def test_an_upgrade_that_fails_leaves_nothing_behind(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PowerFailureError(Exception):
        pass

    create_table, created = op.create_table, list[str]()

    def create_some(name: str, *columns: object, **options: object) -> object:
        if name == "assignments":
            raise PowerFailureError
        created.append(name)
        return create_table(name, *columns, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(op, "create_table", create_some)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        pytest.raises(PowerFailureError),
    ):
        pool.submit(schema.upgrade, empty_database).result()
    assert created == ["clients", "enrolment_tokens", "jobs", "attempts"]
    engine = create_engine(async_url(empty_database))
    async with engine.connect() as connection:
        left = await connection.run_sync(lambda sync: sqlalchemy.inspect(sync).get_table_names())
    await engine.dispose()
    assert left == []


@pytest.mark.fault("F29")
async def test_an_empty_database_is_not_opened(empty_database: str) -> None:
    with pytest.raises(SchemaVersionError, match=r"is empty.*fedplat-server db upgrade --database \S+") as caught:
        await open_store(empty_database)
    path = async_url(empty_database).database or ""
    assert path in str(caught.value)
    assert not Path(path).exists()


@pytest.mark.fault("F29")
async def test_an_older_database_is_not_opened(database: str) -> None:
    await _run(database, "DELETE FROM alembic_version")
    with pytest.raises(SchemaVersionError, match="fedplat-server db upgrade"):
        await open_store(database)


@pytest.mark.fault("F29")
async def test_a_newer_database_is_not_opened_nor_upgraded(database: str) -> None:
    await _run(
        database,
        "UPDATE alembic_version SET version_num = '9999'",
        "UPDATE schema_compatibility SET compatible_from = '9999'",
    )
    with pytest.raises(SchemaVersionError, match=r"written by a newer fedplat \(schema 9999"):
        await open_store(database)
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        pytest.raises(SchemaVersionError, match="newer fedplat"),
    ):
        pool.submit(schema.upgrade, database).result()


@pytest.mark.parametrize("revision", ["0012", "0021"])
async def test_a_database_between_releases_is_not_opened_nor_upgraded(database: str, revision: str) -> None:
    await _run(
        database,
        f"UPDATE alembic_version SET version_num = '{revision}'",
        "UPDATE schema_compatibility SET compatible_from = '0019'",
    )
    expected = f"at schema {revision}, which belongs to no release.*first upgrade it with a version that knows"
    with pytest.raises(SchemaVersionError, match=expected):
        await open_store(database)
    with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.raises(SchemaVersionError, match=expected):
        pool.submit(schema.upgrade, database).result()


@pytest.mark.parametrize(
    ("revision", "compatible_from", "code", "usable"),
    [
        ("0019", "0019", "0019", True),
        ("0020", "0019", "0019", True),  # expanded: the previous release may continue, and start again
        ("0021", "0020", "0019", False),  # contracted
        ("0019", "0019", "0020", False),  # not upgraded yet
        ("0018", None, "0018", True),
        ("0018", None, "0019", False),
        (None, None, "0019", False),
    ],
)
def test_which_code_may_use_a_database(
    revision: str | None, compatible_from: str | None, code: str, *, usable: bool
) -> None:
    assert schema.is_usable(schema.SchemaState(revision, compatible_from), code) is usable


@pytest.mark.fault("F29")
async def test_a_newer_database_that_names_this_code_as_compatible_is_used(database: str) -> None:
    await _run(
        database,
        "UPDATE alembic_version SET version_num = '9999'",
        f"UPDATE schema_compatibility SET compatible_from = '{schema.head()}'",
    )
    store = await open_store(database)
    await store.close()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(schema.upgrade, database).result() == "9999"
    await _run(database, "UPDATE schema_compatibility SET compatible_from = '9998'")
    with pytest.raises(SchemaVersionError, match=r"written by a newer fedplat \(schema 9999, for code of 9998"):
        await open_store(database)


async def test_an_upgrade_states_the_oldest_code_that_may_use_the_database(database: str) -> None:
    engine = create_engine(async_url(database))
    async with engine.connect() as connection:
        (found,) = (await connection.execute(text("SELECT compatible_from FROM schema_compatibility"))).scalars()
    await engine.dispose()
    assert "0019" <= found <= schema.head()


async def test_a_database_that_does_not_answer() -> None:
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1"):
        await open_store("postgresql://user:secret@127.0.0.1:1/fedplat")


async def test_a_password_is_not_shown() -> None:
    with pytest.raises(StoreUnavailableError) as caught:
        await open_store("postgresql://user:secret@127.0.0.1:1/fedplat")
    assert "secret" not in str(caught.value)


async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError, match="there is no folder"):
        await open_store(str(tmp_path / "nowhere" / "fedplat.db"))


def test_an_upgrade_makes_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "100%.db"
    schema.upgrade(str(path))
    assert schema.current(f"sqlite:///{path}") == schema.head()


async def test_what_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    with pytest.raises(Exception, match="file is not a database"):
        await open_store(str(path))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("runs/demo.db", "sqlite+aiosqlite:///runs/demo.db"),
        ("/var/lib/fedplat.db", "sqlite+aiosqlite:////var/lib/fedplat.db"),
        ("sqlite:///demo.db", "sqlite+aiosqlite:///demo.db"),
        ("sqlite+aiosqlite:////a/b.db", "sqlite+aiosqlite:////a/b.db"),
        ("postgresql://u:p@h:1/d", "postgresql+asyncpg://u:p@h:1/d"),
        ("postgres://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgresql+asyncpg://h/d?sslmode=require", "postgresql+asyncpg://h/d?ssl=require"),
    ],
)
def test_databases_are_named_by_paths_and_urls(given: str, expected: str) -> None:
    url = async_url(given)
    assert isinstance(url, URL)
    assert url.render_as_string(hide_password=False) == expected


@pytest.mark.parametrize(
    "given",
    ["", "  ", ":memory:", "sqlite://", "sqlite:///:memory:", "mysql://h/d", "postgresql+psycopg2://h/d", "a b://x"],
)
def test_rubbish_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("expected a path, sqlite:///path or postgresql://")):
        async_url(given)


def test_what_cannot_be_read_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        async_url("postgresql://user:secret@host:port/d")
    assert "secret" not in str(caught.value)


def _finds_nothing(_: str) -> None:
    return None


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", _finds_nothing)
    with pytest.raises(ConfigError, match=r"pip install .*'asyncpg>="):
        async_url("postgresql://h/d")
