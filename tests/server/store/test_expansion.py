"""Steps of the schema that run beside daemons of the previous release, and those that must not."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path

import pytest
from sqlalchemy import text

from fedplat_server.database import schema
from fedplat_server.database.engine import async_url, create_engine
from fedplat_server.errors import StoreUnavailableError
from support import expansion, migrations, releases

LAST = releases.schema_head(releases.names()[-1])


async def test_each_step_since_the_first_release_only_adds(empty_database: str) -> None:
    assert await expansion.lint(empty_database, LAST) == []


async def test_the_first_step_makes_the_schema_of_the_first_release(
    empty_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = await expansion.read_schema(empty_database, schema.FIRST_RELEASE)
    monkeypatch.setattr(schema, "_MIGRATIONS", releases.unpack_migrations(releases.names()[0], tmp_path))
    assert await expansion.read_schema(empty_database, schema.FIRST_RELEASE) == ours


def test_this_version_continues_where_the_last_release_stopped() -> None:
    assert schema.head() >= LAST
    assert schema.read_compatible_from(schema.head()) <= LAST


async def test_a_step_that_only_adds(empty_database: str, tmp_path: Path) -> None:
    migrations.write_step(tmp_path, migrations.EXPANDS)
    with migrations.added(tmp_path):
        assert await expansion.lint(empty_database, LAST) == []


BREAKAGES = {
    "a table is dropped": ("op.drop_table('deliveries')", "table deliveries is gone"),
    "a table is renamed": ("op.rename_table('deliveries', 'sent')", "table deliveries is gone"),
    "a column is dropped": (
        "with op.batch_alter_table('jobs') as batch: batch.drop_column('cohort')",
        "jobs.cohort is gone",
    ),
    "a column is renamed": (
        "with op.batch_alter_table('jobs') as batch: batch.alter_column('cohort', new_column_name='drawn')",
        "jobs.cohort is gone",
    ),
    "another type": (
        "with op.batch_alter_table('jobs') as batch: batch.alter_column('round', type_=sa.BigInteger())",
        "jobs.round was",
    ),
    "a column must be given": (
        "with op.batch_alter_table('jobs') as batch: batch.alter_column('cohort', nullable=False)",
        "jobs.cohort was",
    ),
    "a new column must be given": (
        "with op.batch_alter_table('webhooks') as batch: "
        "batch.add_column(sa.Column('future', sa.String(), nullable=False))",
        "webhooks.future is new: expected a nullable column",
    ),
    "a new unique constraint": (
        "with op.batch_alter_table('webhooks') as batch: batch.create_unique_constraint('uq_url', ['url'])",
        "webhooks: new unique ['url']",
    ),
    "a new unique index": (
        "op.create_index('ix_webhooks_url', 'webhooks', ['url'], unique=True)",
        "webhooks: new unique index ix_webhooks_url ['url']",
    ),
    "a new foreign key": (
        "with op.batch_alter_table('deliveries') as batch: "
        "batch.create_foreign_key('fk_new', 'events', ['event_sequence'], ['sequence'])",
        "deliveries: new foreign key ['event_sequence'] to events ['sequence']",
    ),
    "a new check": (
        "with op.batch_alter_table('webhooks') as batch: batch.create_check_constraint('ck_new', 'length(url) < 9')",
        "webhooks: new check",
    ),
    "a unique constraint is dropped": (
        "with op.batch_alter_table('operators') as batch: batch.drop_constraint('uq_operators_token_hash')",
        "operators: unique ['token_hash'] is gone",
    ),
    "an index is dropped": (
        "op.drop_index('ix_events_job_id_sequence', 'events')",
        "events: index ix_events_job_id_sequence ['job_id', 'sequence'] is gone",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKAGES)
async def test_a_step_that_breaks_older_code(empty_database: str, tmp_path: Path, name: str) -> None:
    body, breakage = BREAKAGES[name]
    step = migrations.write_step(tmp_path, body)
    with migrations.added(tmp_path):
        found = await expansion.lint(empty_database, LAST)
    assert any(each.startswith(f"{step}: {breakage}") for each in found), found


@pytest.mark.parametrize(
    ("stated", "mistake"),
    [
        ("", "expected a revision of four digits"),
        ("21", "expected a revision of four digits"),
        ("0018", "it never decreases"),
        (migrations.following(schema.head()), "the head of the last release, whose daemons continue"),
    ],
)
async def test_what_a_step_must_state(empty_database: str, tmp_path: Path, stated: str, mistake: str) -> None:
    migrations.write_step(tmp_path, "", compatible_from=stated)
    with migrations.added(tmp_path):
        (found,) = await expansion.lint(empty_database, LAST)
    assert mistake in found


@pytest.mark.slow
async def test_a_step_may_contract_once_the_last_release_does_without(empty_database: str, tmp_path: Path) -> None:
    """The release whose head is the first step no longer uses the column."""
    expanded = migrations.write_step(tmp_path, migrations.EXPANDS)
    body = "with op.batch_alter_table('jobs') as batch: batch.drop_column('cohort')"
    contracted = migrations.write_step(tmp_path, body, after=expanded, compatible_from=expanded)
    with migrations.added(tmp_path):
        assert await expansion.lint(empty_database, last_release=expanded) == []
        (found,) = await expansion.lint(empty_database, LAST)
    assert found.startswith(f"{contracted}: compatible_from is {expanded}: expected at most {LAST}")


class _Pauses:
    """Stands for `random` in the upgrade: what happens when the upgrade pauses."""

    def __init__(self) -> None:
        self.paused = threading.Event()

    def uniform(self, low: float, high: float) -> float:
        self.paused.set()
        return 0.0


@pytest.mark.fault("F29")
async def test_an_upgrade_gives_way_to_the_transactions_of_daemons(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transaction has read from a table that the upgrade changes. Others that come later do not wait for its end."""
    pauses = _Pauses()
    monkeypatch.setattr(schema, "random", pauses)
    monkeypatch.setattr(schema, "LOCK_TIMEOUT_MS", 50)
    monkeypatch.setattr(schema, "MAX_TRIES", 1_000_000)
    head = migrations.write_step(tmp_path, migrations.EXPANDS)
    engine = create_engine(async_url(postgres))
    with migrations.added(tmp_path), concurrent.futures.ThreadPoolExecutor(2) as pool:
        async with engine.connect() as holder, engine.connect() as other:
            await holder.execute(text("SELECT count(*) FROM jobs"))
            upgrade = pool.submit(schema.upgrade, postgres)
            assert pauses.paused.wait(60)
            await other.execute(text("UPDATE jobs SET reason = ''"))  # it would wait forever if the upgrade did
            await other.commit()
            assert not upgrade.done()
            await holder.rollback()
        assert upgrade.result(60) == head
    await engine.dispose()


@pytest.mark.fault("F29")
async def test_an_upgrade_that_never_gets_its_lock_changes_nothing(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "random", _Pauses())
    monkeypatch.setattr(schema, "LOCK_TIMEOUT_MS", 50)
    monkeypatch.setattr(schema, "MAX_TRIES", 2)
    migrations.write_step(tmp_path, migrations.EXPANDS)
    before = schema.head()
    engine = create_engine(async_url(postgres))
    with migrations.added(tmp_path), concurrent.futures.ThreadPoolExecutor(1) as pool:
        async with engine.connect() as holder:
            await holder.execute(text("SELECT count(*) FROM jobs"))
            upgrade = pool.submit(schema.upgrade, postgres)
            with pytest.raises(StoreUnavailableError, match=r"was not changed: .* kept a table locked during 2 tries"):
                upgrade.result(60)
            await holder.rollback()
        assert pool.submit(schema.current, postgres).result() == before
    await engine.dispose()
