"""The owner of a store: one small file with the id of a database, so that no other database removes what is there."""

from __future__ import annotations

import json
from collections.abc import Callable

from fedplat_server.errors import BlobError, ConfigError

NAME = "fedplat.json"
LIMIT_BYTES = 4096


def claim(where: str, database_id: str, create: Callable[[bytes], bool], read: Callable[[], bytes]) -> None:
    """Make a database the owner of a store. Raises `ConfigError` if it has another one.

    `create` writes the file unless it exists, and returns whether it did; `read` returns it.
    """
    if create(json.dumps({"database": database_id}).encode() + b"\n"):
        return
    try:
        content = json.loads(read())
        owner = content["database"]
    except (ValueError, TypeError, KeyError) as exc:
        raise BlobError(f"{where}/{NAME} is damaged: expected JSON with the id of a database") from exc
    if owner != database_id:
        raise ConfigError(
            f"{where} belongs to another database (its id is {str(owner)[:80]!r}, that of this one {database_id!r}): "
            f"choose another prefix or folder. If that database no longer exists, remove {where}/{NAME}; this database "
            "then owns what is there, and removes the models that it does not know"
        )
