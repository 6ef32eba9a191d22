"""Files that silos of decentralised jobs send each other through the server, which cannot read them.

For silos without a port of their own. The sender has encrypted a file for its receiver
(`fedplat.secure_aggregation.relay`). It stays in the attempt's folder until the attempt ends; then, and if the server's
disk is lost, only edges of a round are lost. An upload may be resumed, and replaces one with another digest.

`follow` and `close` run on the event loop; all other methods block, and threads call them.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from fedplat.rounds import Attempt, AttemptKey
from fedplat_server.errors import UploadError
from fedplat_server.storage import files
from fedplat_server.storage.spool_file import OpenUpload, SpoolFile, name_attempt


class RelayedFile(NamedTuple):
    """A file from one silo to another, by the name that both know."""

    attempt: AttemptKey
    sender: str
    receiver: str
    name: str


class RelayStore:
    """The files of all open attempts, in a folder that is created if it does not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()  # taken before the lock of a file, never after
        self._open: set[AttemptKey] = set()
        self._files: dict[RelayedFile, SpoolFile] = {}
        self._writers: dict[SpoolFile, OpenUpload] = {}
        self._deletions: set[asyncio.Task[None]] = set()
        with files.translate_os_errors(f"making the folder {folder}", "updates"):
            folder.mkdir(parents=True, exist_ok=True)

    def keep(self, attempts: Collection[AttemptKey], known: Collection[str] = ()) -> None:
        """Keep the files of these attempts, delete those of the other `known` ones, and set unknown ones aside.

        `known` has names (`name_attempt`). Only for the start.
        """
        self._open = set(attempts)
        self.expire()
        with self._lock, files.translate_os_errors("clearing the relay", "updates"):
            files.clear_set_aside(self.folder, {name_attempt(each) for each in attempts}, known, files.is_digest)

    def expire(self) -> None:
        """Remove the files that were set aside long enough ago."""
        files.expire_set_aside(self.folder)

    def count_received(self, key: RelayedFile, digest: str) -> int:
        """Return how many bytes of a file were received, where its upload resumes."""
        file = self._find(key)
        if file is None or file.digest != digest:
            return 0
        with file.lock, files.translate_os_errors("reading a relayed file", "updates"):
            file.load()
            return file.received

    def open(self, key: RelayedFile, digest: str, size_bytes: int, offset: int) -> OpenUpload:
        """Resume or start an upload; one with another digest is discarded, another writer is fenced.

        Raises `UploadError` if the attempt has ended, or if the upload did not stop at `offset`.
        """
        if not files.is_digest(digest):
            raise UploadError(f"{digest[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
        file = self._find(key)
        if file is None or file.digest != digest:
            file = self._replace(key, digest)
        with file.lock, files.translate_os_errors("opening a relayed file", "updates"):
            if file.gone:
                raise UploadError("the upload was discarded meanwhile; resume at 0")
            file.load()
            if (earlier := self._writers.get(file)) is not None:
                earlier.fence()
            if offset != file.received:
                raise UploadError(f"offset {offset} is not where the upload stopped; resume at {file.received}")
            writer = self._writers[file] = OpenUpload(file, size_bytes, self._writers)
            return writer

    def find(self, key: RelayedFile) -> Path | None:
        """Return the path of a complete file; None if it was not sent yet."""
        file = self._find(key)
        if file is None:
            return None
        with file.lock, files.translate_os_errors("reading a relayed file", "updates"):
            file.load()
            return None if file.gone or not file.is_complete() else file.path

    def follow(self, attempt: Attempt) -> None:
        """Accept files of an attempt of a decentralised job while it is open, and delete them afterwards."""
        if attempt.is_open:
            self._open.add(attempt.key)
        elif attempt.key in self._open:
            self._open.discard(attempt.key)
            task = asyncio.create_task(asyncio.to_thread(self._delete, attempt.key), name="delete relayed files")
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    async def close(self) -> None:
        """Wait for pending deletions."""
        await asyncio.gather(*self._deletions, return_exceptions=True)

    def _delete(self, attempt: AttemptKey) -> None:
        folder = self.folder / name_attempt(attempt)
        with self._lock, files.translate_os_errors("deleting relayed files", "updates"):
            for key in [each for each in self._files if each.attempt == attempt]:
                self._remove(key)
            if folder.exists():
                shutil.rmtree(folder)

    def _replace(self, key: RelayedFile, digest: str) -> SpoolFile:
        folder = self.folder / name_attempt(key.attempt)
        with self._lock, files.translate_os_errors("opening a relayed file", "updates"):
            if key.attempt not in self._open:
                raise UploadError("the attempt has ended")
            self._remove(key)
            folder.mkdir(exist_ok=True)
            file = self._files[key] = SpoolFile(folder / f"{_hash(key)}-{digest}", digest)
            return file

    def _find(self, key: RelayedFile) -> SpoolFile | None:
        """Return a file, also one of an earlier process."""
        with self._lock:
            if (file := self._files.get(key)) is None and key.attempt in self._open:
                found = sorted((self.folder / name_attempt(key.attempt)).glob(f"{_hash(key)}-*"))
                if found:
                    file = self._files[key] = SpoolFile(found[0], found[0].name.rpartition("-")[2])
            return file

    def _remove(self, key: RelayedFile) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            with file.lock:
                if (writer := self._writers.get(file)) is not None:
                    writer.fence()
                file.remove()
                file.gone = True


def _hash(key: RelayedFile) -> str:
    return hashlib.sha256("\n".join((key.sender, key.receiver, key.name)).encode()).hexdigest()[:32]
