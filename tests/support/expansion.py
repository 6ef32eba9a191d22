"""What a migration does to code of the previous release: nothing, as long as it only adds. See `migrations/env.py`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy
from alembic import command
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection

from fedplat_server.database import schema
from fedplat_server.database.engine import WRITES, async_url, create_engine


@dataclasses.dataclass(frozen=True)
class Column:
    type: str
    nullable: bool
    default: str | None


@dataclasses.dataclass(frozen=True)
class TableShape:
    """What a database says of a table: what an INSERT or a SELECT of older code may depend on."""

    columns: Mapping[str, Column]
    constraints: frozenset[str]
    indexes: frozenset[str]


Shape = Mapping[str, TableShape]


def read_shape(connection: Connection) -> Shape:
    inspector = sqlalchemy.inspect(connection)
    columns, keys = inspector.get_multi_columns(), inspector.get_multi_pk_constraint()
    uniques, checks = inspector.get_multi_unique_constraints(), inspector.get_multi_check_constraints()
    foreign_keys, indexes = inspector.get_multi_foreign_keys(), inspector.get_multi_indexes()
    shape: dict[str, TableShape] = {}
    for table, found in columns.items():
        own = [each for each in indexes[table] if not each.get("duplicates_constraint")]
        constraints = {
            f"primary key {keys[table]['constrained_columns'] if keys[table] else []}",
            *(f"unique {each['column_names']}" for each in uniques[table]),
            *(
                f"foreign key {each['constrained_columns']} to {each['referred_table']} {each['referred_columns']}"
                for each in foreign_keys[table]
            ),
            *(f"check {each['sqltext']}" for each in checks[table]),
            *(f"unique index {_columns(each)}" for each in own if each["unique"]),
        }
        shape[table[1]] = TableShape(
            {each["name"]: Column(str(each["type"]), each["nullable"], each.get("default")) for each in found},
            frozenset(constraints),
            frozenset(map(_columns, own)),
        )
    return shape


def _columns(index: Mapping[str, Any]) -> str:
    return f"{index['name']} {index['column_names']}"


def find_breakages(before: Shape, after: Shape) -> Iterator[str]:
    """Yield what may break code that was written for `before`."""
    for name, old in before.items():
        if name not in after:
            yield f"table {name} is gone"
            continue
        new = after[name]
        yield from (f"{name}: {each} is gone" for each in sorted(old.constraints - new.constraints))
        yield from (f"{name}: new {each}" for each in sorted(new.constraints - old.constraints))
        yield from (f"{name}: index {each} is gone" for each in sorted(old.indexes - new.indexes))
        for column, was in old.columns.items():
            if column not in new.columns:
                yield f"{name}.{column} is gone"
            elif new.columns[column] != was:
                yield f"{name}.{column} was {was} and is {new.columns[column]}"
        for column in new.columns.keys() - old.columns.keys():
            if not new.columns[column].nullable and new.columns[column].default is None:
                yield f"{name}.{column} is new: expected a nullable column, or a server default"


async def read_schema(database: str, revision: str) -> Shape:
    """The shape that the steps up to a revision give to an empty database, which stays empty."""

    def run(connection: Connection) -> Shape:
        with connection.begin() as transaction:
            command.upgrade(schema.config(connection), revision)
            shape = read_shape(connection)
            transaction.rollback()
        return shape

    engine = create_engine(async_url(database), foreign_keys=False)
    try:
        async with engine.execution_options(**{WRITES: True}).connect() as connection:
            return await connection.run_sync(run)
    finally:
        await engine.dispose()


async def lint(database: str, last_release: str) -> list[str]:
    """Run the steps since the first release on an empty database, and roll back; what is wrong with them.

    `last_release` is the head of the last release, whose daemons continue during the upgrade.
    """
    engine = create_engine(async_url(database), foreign_keys=False)
    try:
        async with engine.execution_options(**{WRITES: True}).connect() as connection:
            return await connection.run_sync(lambda sync: list(_lint(sync, last_release)))
    finally:
        await engine.dispose()


def _lint(connection: Connection, last_release: str) -> Iterator[str]:
    with connection.begin() as transaction:
        command.upgrade(schema.config(connection), schema.FIRST_RELEASE)
        steps = [
            each
            for each in ScriptDirectory.from_config(schema.config()).walk_revisions()
            if each.revision > schema.FIRST_RELEASE
        ]
        compatible_from, before = schema.FIRST_RELEASE, read_shape(connection)
        for step in reversed(steps):
            command.upgrade(schema.config(connection), step.revision)
            after = read_shape(connection)
            yield from _lint_step(step, compatible_from, last_release, list(find_breakages(before, after)))
            compatible_from, before = getattr(step.module, "compatible_from", compatible_from), after
        transaction.rollback()


def _lint_step(step: Script, before: str, last_release: str, breakages: list[str]) -> Iterator[str]:
    stated = getattr(step.module, "compatible_from", None)
    if not isinstance(stated, str) or not re.fullmatch(r"\d{4}", stated):
        yield f"{step.revision}: compatible_from is {stated!r}: expected a revision of four digits"
    elif stated < before:
        yield f"{step.revision}: compatible_from is {stated}, but {before} in the step before it: it never decreases"
    elif stated > last_release:
        yield (
            f"{step.revision}: compatible_from is {stated}: expected at most {last_release}, the head of the last "
            "release, whose daemons continue during the upgrade"
        )
    elif stated == before:
        yield from (f"{step.revision}: {each}" for each in breakages)
