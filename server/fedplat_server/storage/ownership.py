"""The owner of a place: one small file with the id of a database, so that no other database removes what is there.

A database gets its id in the transaction that makes or upgrades its tables, and the file is written after that: a place
never names an id that no database has. A place without the file, such as one of an older release, gets it only if the
database knows most of what is there (`Contents`); until then nothing is removed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedplat import durable
from fedplat_server import crash_points, errors
from fedplat_server.storage import files, object_store

NAME = "fedplat.json"
LIMIT_BYTES = 4096


class Owner(NamedTuple):
    """A database: its id, and where it is, without a password ("": unknown)."""

    id: str
    url: str = ""

    def __str__(self) -> str:
        return f"{self.url} with the id {self.id!r}" if self.url else f"with the id {self.id!r}"


class Contents(NamedTuple):
    """The models and updates in a place without an owner: how many a database mentions, and how many it does not."""

    num_known: int
    num_unknown: int

    @classmethod
    def of(cls, found: frozenset[str], known: frozenset[str]) -> Contents:
        """Compare the names of what was found with those that the database knows."""
        return cls(len(found & known), len(found - known))


def find_data(data_dir: Path) -> frozenset[str]:
    """Return the names of the models in a data folder, and of the attempts whose updates or relayed files are there."""
    return files.find_digests(data_dir, "blobs/??/??/*", "uploads/*", "relay/*")


Look = Callable[[], Contents]
"""A function that looks into a place that has no owner yet."""


def look_into_empty() -> Contents:
    """Return the contents of a place that is empty."""
    return Contents(0, 0)


def claim_folder(folder: Path, database: Owner, place: files.Place, look: Look = look_into_empty) -> None:
    """Make a database the owner of a folder. Raises `ConfigError` if it belongs to another one, or `BlobError`."""
    path = folder / NAME

    def create(content: bytes) -> bool:
        try:
            durable.write_bytes(path, content, overwrite=False)
        except FileExistsError:
            return False
        return True

    with files.translate_os_errors(f"claiming the folder {folder}", place):
        durable.make_folder(folder)
        if (owner := find_owner(folder)) is None:
            _check_contents(str(folder), database, look())
            if create(_to_json(database)):
                return
        elif owner.id != database.id and owner.url == database.url != "" and look() == look_into_empty():
            durable.write_bytes(path, _to_json(database))  # its file was removed and made again, and there was nothing
    check_folder(folder, database)


def claim_store(store: object_store.ObjectStore, database: Owner, look: Look = look_into_empty) -> None:
    """Make a database the owner of an object store's prefix. Raises `ConfigError` if it belongs to another one."""
    if store.head(NAME) is None:
        _check_contents(store.url, database, look())
        with crash_points.step("object.claim"):
            if store.put(NAME, _to_json(Owner(database.id)), create=True):
                return
    _check_owner(store.url, _parse(store.url, store.read(NAME, LIMIT_BYTES)), database)


def check_folder(folder: Path, database: Owner) -> None:
    """Raise `ConfigError` if a folder belongs to another database."""
    owner = find_owner(folder)
    if owner is not None:
        _check_owner(str(folder), owner, database)


def check_new_database(data_dir: Path, url: str) -> None:
    """Raise `ConfigError` if the database at `url`, which is missing or empty, cannot be that of a data folder."""
    owner = find_owner(data_dir)
    if not find_data(data_dir) and (owner is None or owner.url == url):
        return
    found = f"belongs to the database {owner}" if owner is not None else "has models or updates of a database"
    raise errors.ConfigError(
        f"the data folder {data_dir} {found}, and {url} is new: name the database with --database (or "
        "FEDPLAT_DATABASE) as before, restore that file from a backup, or choose another folder with --data-dir"
    )


def find_owner(folder: Path) -> Owner | None:
    """Return the database to which a folder belongs; None if it has no owner yet."""
    try:
        content = (folder / NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as exc:
        raise errors.ConfigError(f"{folder / NAME} cannot be read ({exc.strerror}): make it readable") from exc
    return _parse(str(folder), content)


def _to_json(database: Owner) -> bytes:
    content = {"database": database.id} | ({"url": database.url} if database.url else {})
    return json.dumps(content).encode() + b"\n"


def _parse(where: str, content: bytes) -> Owner:
    try:
        stored = json.loads(content)
        return Owner(str(stored["database"])[:80], str(stored.get("url", ""))[:500])
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise errors.BlobError(f"{where}/{NAME} is damaged: expected JSON with the id of a database") from exc


def _check_owner(where: str, owner: Owner, database: Owner) -> None:
    if owner.id != database.id:
        raise errors.ConfigError(
            f"{where} belongs to another database ({owner}) than this one ({database}), and nothing was removed: name "
            "its database with --database (or FEDPLAT_DATABASE), or choose another folder or prefix. If that database "
            f"no longer exists, write {json.dumps({'database': database.id})} into {where}/{NAME}; this database then "
            "owns what is there"
        )


def _check_contents(where: str, database: Owner, contents: Contents) -> None:
    if contents.num_unknown > contents.num_known:
        raise errors.ConfigError(
            f"{where} has {contents.num_unknown} models or updates that the database ({database}) does not know, and "
            "nothing was removed: name the database to which they belong with --database (or FEDPLAT_DATABASE), or "
            f"choose another folder or prefix. If this database is the right one, write "
            f"{json.dumps({'database': database.id})} into {where}/{NAME}"
        )
