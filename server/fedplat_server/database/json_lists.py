"""Lists as one parameter of a query, as JSON: databases limit the number of parameters.

A list of keys is a table to join: neither database uses an index for a long list of tuples.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from typing import Any

import sqlalchemy
from sqlalchemy import FromClause, Integer, String, column, func, select

from fedplat.rounds import AttemptKey


def strings(dialect: str, values: Collection[str]) -> sqlalchemy.Select[Any]:
    """Return a query for these strings."""
    as_json = json.dumps(list(values))
    if dialect == "postgresql":
        return select(func.json_array_elements_text(_json(as_json)).column_valued("value"))
    return select(func.json_each(as_json).table_valued("value").c.value)


@functools.cache
def attempt_keys(dialect: str) -> FromClause:
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


def key_values(keys: Collection[AttemptKey]) -> dict[str, str]:
    """Return the parameters of a query on `attempt_keys`."""
    return {"keys": json.dumps([key._asdict() for key in keys])}


def _json(text: Any) -> sqlalchemy.Cast[Any]:
    return sqlalchemy.cast(sqlalchemy.cast(text, sqlalchemy.Text), sqlalchemy.JSON)
