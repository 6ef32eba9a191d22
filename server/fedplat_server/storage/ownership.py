"""The owner of a store: one small file with the id of a database, so that no other database removes what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from fedplat import durable
from fedplat_server import crash_points
from fedplat_server.errors import BlobError, ConfigError
from fedplat_server.storage import files
from fedplat_server.storage.object_store import ObjectStore

NAME = "fedplat.json"
LIMIT_BYTES = 4096


def claim_folder(folder: Path, database_id: str, place: files.Place) -> None:
    """Make a database the owner of a folder. Raises `ConfigError` if it has another one, or `BlobError`."""
    path = folder / NAME

    def create(content: bytes) -> bool:
        try:
            durable.write_bytes(path, content, overwrite=False)
        except FileExistsError:
            return False
        return True

    with files.translate_os_errors(f"claiming the folder {folder}", place):
        durable.make_folder(folder)
        _claim(str(folder), database_id, create, path.read_bytes)


def claim_store(store: ObjectStore, database_id: str) -> None:
    """Make a database the owner of an object store's prefix. Raises `ConfigError` if it has another one."""

    def create(content: bytes) -> bool:
        with crash_points.step("object.claim"):
            return store.put(NAME, content, create=True)

    _claim(store.url, database_id, create, lambda: store.read(NAME, LIMIT_BYTES))


def _claim(where: str, database_id: str, create: Callable[[bytes], bool], read: Callable[[], bytes]) -> None:
    # `create` writes the file unless it exists, and returns whether it did.
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
