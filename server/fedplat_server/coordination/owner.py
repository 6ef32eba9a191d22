"""The claim of a data folder, and of the places of `--blobs`, by the database, before anything is removed from them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fedplat_server.database.engine import describe
from fedplat_server.database.store import Store
from fedplat_server.instruments import Instruments
from fedplat_server.storage import blob_folder, blob_stores, ownership, spool_file
from fedplat_server.storage.blobs import BlobStore
from fedplat_server.storage.ownership import Contents, Owner

RECENT_S = 7 * 86_400.0
"""Attempts that ended before this are not looked for in a folder of updates, which belong to open ones."""


async def identify(store: Store, url: str) -> Owner:
    """Return the id of a database, and its URL without a password."""
    return Owner(await store.retention.read_database_id(), describe(url))


async def list_attempts(store: Store) -> frozenset[str]:
    """Return the names of the folders of all attempts that may have updates (`spool_file.name_attempt`)."""
    attempts = await store.retention.list_recent_attempts(time.time() - RECENT_S)
    return frozenset(map(spool_file.name_attempt, attempts))


async def claim_data_dir(store: Store, data_dir: Path, url: str) -> None:
    """Make the database the owner of a data folder. Raises `ConfigError` if it belongs to another one."""
    stored = await store.retention.list_digests()
    await _claim_data_dir(store, data_dir, await identify(store, url), stored)


async def open_blobs(
    store: Store, place: blob_stores.BlobPlace, url: str, instruments: Instruments | None = None
) -> tuple[BlobStore, blob_folder.StoredDigests]:
    """Return the blobs of the database at `url`, and the digests that it mentions.

    Raises `ConfigError` if the data folder or the blobs belong to another database.
    """
    database, stored = await identify(store, url), await store.retention.list_digests()
    await _claim_data_dir(store, place.data_dir, database, stored)
    blobs = await asyncio.to_thread(place.open, instruments)
    await asyncio.to_thread(blobs.claim, database, stored.mentioned)
    return blobs, stored


async def _claim_data_dir(store: Store, data_dir: Path, database: Owner, stored: blob_folder.StoredDigests) -> None:
    is_owned = await asyncio.to_thread(ownership.find_owner, data_dir) is not None
    known = stored.mentioned if is_owned else stored.mentioned | await list_attempts(store)
    await asyncio.to_thread(
        ownership.claim_folder, data_dir, database, "models", lambda: Contents.of(ownership.find_data(data_dir), known)
    )
