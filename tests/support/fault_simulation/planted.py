"""Bugs of ordering that are put into the server for a simulation, which must find them.

No test that kills the server at one point can: after SIGKILL the kernel still has what was not synced, a process that
is not suspended between two steps does both, and a client that is asked again sends the same again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fedplat import durable
from fedplat.rounds import AssignmentId
from fedplat_server.database.sql_contents import ContentStore
from fedplat_server.database.sql_jobs import JobStore
from fedplat_server.database.transactions import Database
from fedplat_server.storage import blob_folder, blobs, segments, spool, spool_file

LATE_S = 0.3
"""How much later a step comes that should come first."""


def _later(step: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(LATE_S, step)


def _sync_the_blob_after_the_commit() -> None:
    """The bytes of a new model are synced a moment after the version with its digest was committed."""

    def sync_later(descriptor: int) -> None:
        copy = os.dup(descriptor)

        def sync() -> None:
            os.fsync(copy)
            os.close(copy)

        _later(sync)

    blobs.os = cast(Any, SimpleNamespace(fsync=sync_later, close=os.close))


def _sync_the_folder_before_the_rename() -> None:
    """The folder of a blob is synced, and then the blob is moved into it."""

    def replace(source: Path, target: Path) -> None:
        durable.sync(target.parent)
        os.replace(source, target)

    def sync(path: Path) -> None:
        if path.name != "blobs" and path.parent.name == "blobs":
            durable.sync(path)

    blob_folder.os = cast(Any, SimpleNamespace(**{**vars(os), "replace": replace}))
    blob_folder.durable = cast(Any, SimpleNamespace(**{**vars(durable), "sync": sync}))


def _acknowledge_before_the_update_is_synced() -> None:
    """An update is synced a moment after its report was accepted."""

    def sync_later(path: Path) -> None:
        _later(lambda: durable.sync(path) if path.exists() else None)

    spool_file.durable = cast(Any, SimpleNamespace(sync=sync_later, write_all=durable.write_all, Bytes=durable.Bytes))


def _acknowledge_before_the_segment_is_synced() -> None:
    """The records of a segment are synced a moment after their reports were accepted."""

    def sync_later(descriptor: int) -> None:
        copy = os.dup(descriptor)

        def sync() -> None:
            os.fsync(copy)
            os.close(copy)

        asyncio.get_running_loop().call_later(LATE_S, sync)

    segments.os = cast(Any, SimpleNamespace(**{**vars(os), "fdatasync": sync_later}))


def _forget_the_records() -> None:
    """The start does not look for updates in segments, and removes these."""
    segments.read_records = lambda path: iter(())


def _empty_a_segment_too_early() -> None:
    """A segment is emptied as soon as one of its assignments has ended."""
    release = segments.Segments.release

    def release_all(self: segments.Segments, keys: Iterable[AssignmentId]) -> None:
        for segment in self._segments.values():  # pyright: ignore[reportPrivateUsage]
            segment.live.clear()
        release(self, keys)

    segments.Segments.release = release_all


def _acknowledge_before_the_transaction() -> None:
    """The runner answers while the changes are still being written."""
    save = JobStore.save

    async def save_later(self: JobStore, *args: Any, **named: Any) -> None:
        async def run() -> None:
            await asyncio.sleep(LATE_S / 10)
            await save(self, *args, **named)

        behind = asyncio.ensure_future(run())
        behind.add_done_callback(lambda done: done.cancelled() or done.exception())

    JobStore.save = save_later


def _check_the_lease_before_the_write() -> None:
    """The fence is a transaction of its own, and the write another one."""
    write = Database._write  # pyright: ignore[reportPrivateUsage]

    async def check_and_write(self: Any, transaction: Any) -> Any:
        fence, self._fence = self._fence, None
        if fence is not None:
            await self._read(fence)
        try:
            return await write(self, transaction)
        finally:
            self._fence = fence

    Database._write = cast(Any, check_and_write)  # pyright: ignore[reportPrivateUsage]


def _trust_a_folder_that_another_life_has_made() -> None:
    """The start does not sync the spool's folder: a folder that a killed server has made may not be durable.

    One seed in some hundreds finds it; `server/test_spool.py` has a test of its own.
    """
    spool.durable = cast(Any, SimpleNamespace(make_folder=durable.make_folder, sync=_except_at_the_start))


def _except_at_the_start(path: Path) -> None:
    import sys

    if sys._getframe(1).f_code.co_name != "keep":  # pyright: ignore[reportPrivateUsage]
        durable.sync(path)


def _make_folders_without_a_sync() -> None:
    """The folders of models and updates are made, and the data folder is not synced."""
    durable.make_folder = lambda path: path.mkdir(parents=True, exist_ok=True)


def _trust_the_copies_of_rows() -> None:
    """The start does not look whether the disk still has the files of models that are rows of the database."""
    blob_folder.BlobFolder.find_lost = lambda self, digests: []


def _forget_the_updates_in_rows() -> None:
    """The start does not read the updates that are rows of the database."""

    async def load_none(self: ContentStore) -> dict[Any, Any]:
        return {}

    ContentStore.load_updates = load_none


BUGS: dict[str, Callable[[], None]] = {
    "blob-synced-after-the-commit": _sync_the_blob_after_the_commit,
    "folder-synced-before-the-rename": _sync_the_folder_before_the_rename,
    "acknowledged-before-the-sync": _acknowledge_before_the_update_is_synced,
    "acknowledged-before-the-transaction": _acknowledge_before_the_transaction,
    "lease-checked-before-the-write": _check_the_lease_before_the_write,
    "folder-of-a-killed-server": _trust_a_folder_that_another_life_has_made,
    "folders-not-synced": _make_folders_without_a_sync,
    "copies-trusted": _trust_the_copies_of_rows,
    "rows-forgotten": _forget_the_updates_in_rows,
    "records-acknowledged-before-the-sync": _acknowledge_before_the_segment_is_synced,
    "records-forgotten": _forget_the_records,
    "segment-emptied-too-early": _empty_a_segment_too_early,
}


def plant(name: str) -> None:
    """Puts a bug into the server of this process."""
    BUGS[name]()
