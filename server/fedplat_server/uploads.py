"""Resumable uploads: one file for each client and attempt, which grows until its bytes have the promised digest.

The files of jobs with `durability = "spool"` lie in a folder for each attempt, and outlive the process: an update is
on the disk for good (`persist`) before its report is accepted, and stays until its attempt has ended. Those of jobs
with `durability = "memory"` are in memory. Everything here blocks: asyncio calls it in threads, several at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from fedplat import durable
from fedplat_server import crash, files
from fedplat_server.errors import BlobError, SpoolError, UploadError
from fedplat_server.upload_files import MemoryFile, SpoolFile

Attempt = tuple[str, int, int]
"""A job, a round and the number of an attempt."""


class UploadKey(NamedTuple):
    """Names an upload."""

    job_id: str
    round: int
    attempt: int
    client_id: str


class Upload:
    """Where the rest of an upload is written to; made by `UploadStore.open`."""

    def __init__(self, file: SpoolFile, size_bytes: int, writers: dict[SpoolFile, Upload]) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._received = file.received
        self._writers = writers
        self._descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @property
    def received(self) -> int:
        """How many bytes there were when this last wrote."""
        return self._received

    def write(self, data: durable.Bytes) -> None:
        """Appends bytes.

        Raises `UploadError` if they are more than were declared, or if another writer has taken over, and
        `BlobFullError` or `BlobError` if they cannot be stored.
        """
        with self._file.lock:
            if self._writers.get(self._file) is not self:
                raise UploadError("the upload goes on elsewhere, or has ended")
            if self._file.sealed:
                raise UploadError("the update was reported already")
            if self._received + memoryview(data).nbytes > self._size_bytes:
                raise UploadError(f"there are more bytes than the {self._size_bytes} that were declared")
            with files.translated("writing an upload"), crash.step("upload.append"):
                self._file.append(self._descriptor, data)
            self._received = self._file.received

    def finish(self) -> Path:
        """Ends the writing, and returns the file if all bytes are there.

        Raises `UploadError` if some are missing, or if they have another digest: then it starts again at 0.
        """
        self.close()
        file = self._file
        with file.lock:
            if file.is_complete():
                return file.path
            if self._received < self._size_bytes:
                raise UploadError(f"{self._received} of {self._size_bytes} bytes were received")
            if not file.gone:
                with files.translated("restarting an upload"):
                    file.restart()
            raise UploadError(f"the bytes received are not those of {file.digest}; resume at 0")

    def close(self) -> None:
        """Ends the writing; what was received stays. May be called again."""
        with self._file.lock:
            self.fence()

    def fence(self) -> None:
        """Does what `close` does, for those who hold the file's lock."""
        if self._writers.get(self._file) is self:
            del self._writers[self._file]
            os.close(self._descriptor)


class UploadStore:
    """Uploads in a folder of their own, which is made if it is not there; those of some jobs are in memory."""

    def __init__(self, folder: Path, in_memory: Callable[[str], bool] = lambda _: False) -> None:
        self.folder = folder
        self._in_memory = in_memory
        self._lock = threading.Lock()  # taken before the lock of a file, never after
        self._files: dict[UploadKey, SpoolFile] = {}
        self._writers: dict[SpoolFile, Upload] = {}
        self._broken: set[Attempt] = set()
        self._left: dict[str, list[Path]] = {}
        with files.translated(f"making the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def received(self, key: UploadKey, digest: str) -> int:
        """How many of these bytes there are: where to resume."""
        file = self._find(key, digest)
        if file is None:
            return 0
        with file.lock, files.translated("reading an upload"):
            file.load()
            return file.received

    def open(self, key: UploadKey, digest: str, size_bytes: int, offset: int, limit_bytes: int | None = None) -> Upload:
        """Goes on with an upload, or starts it. An upload of other bytes is thrown away; another writer is fenced.

        Raises `UploadError` if the declared size is beyond the limit, if the offset is not where the upload
        stopped, or if other bytes were taken as complete before.
        """
        if not files.is_digest(digest):
            raise UploadError(f"{digest[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
        if size_bytes < 0 or (limit_bytes is not None and size_bytes > limit_bytes):
            raise UploadError(f"{size_bytes} bytes were declared; at most {limit_bytes} are accepted")
        file = self._find(key, digest) or self._replace(key, digest)
        with file.lock, files.translated("opening an upload"):
            if file.gone:
                raise UploadError("the upload was thrown away meanwhile; resume at 0")
            file.load()
            if (earlier := self._writers.get(file)) is not None:
                earlier.fence()
            if offset != file.received:
                raise UploadError(f"offset {offset} is not where the upload stopped; resume at {file.received}")
            writer = self._writers[file] = Upload(file, size_bytes, self._writers)
            return writer

    def complete(self, key: UploadKey, digest: str) -> Path | None:
        """The file, if all bytes are there. From now on they stay as they are, until they are discarded."""
        file = self._find(key, digest)
        if file is None:
            return None
        with file.lock, files.translated("reading an upload"):
            file.load()
            if file.gone or not file.is_complete():
                return None
            if (writer := self._writers.get(file)) is not None:
                writer.fence()
            file.sealed = True
            return file.path

    def persist(self, key: UploadKey, digest: str) -> int:
        """Makes a complete update outlive a power failure, and returns its size. Costs nothing if it does already.

        A sync that failed is never tried again: the kernel may have dropped what it could not write, and would say
        yes. The update is thrown away, to be sent again. Raises `UploadError` if it is not there, `BlobFullError` or
        `BlobError` if it cannot be written, and `SpoolError` if nothing in the attempt's folder can be trusted.
        """
        file = self._find(key, digest)
        if file is None:
            raise UploadError("the update is not there any more; resume at 0")
        try:
            with file.lock, files.translated("syncing an update"):
                if file.gone:
                    raise UploadError("the update is not there any more; resume at 0")
                if not file.durable:
                    file.sync()
        except BlobError:
            self.discard(key)
            raise
        if not file.durable and not isinstance(file, MemoryFile):
            self._sync_folder(key)
        file.durable = True
        return file.received

    def discard(self, key: UploadKey) -> None:
        """Throws away what a client uploaded for an attempt."""
        with self._lock, files.translated("discarding an upload"), crash.step("upload.discard"):
            self._remove(key)

    def discard_attempt(self, job_id: str, round_: int, attempt: int) -> None:
        """Throws away what all clients uploaded for an attempt."""
        name = (job_id, round_, attempt)
        with self._lock, files.translated("discarding the uploads of an attempt"), crash.step("spool.discard"):
            for key in [key for key in self._files if key[:3] == name]:
                self._remove(key)
            self._broken.discard(name)
            _remove_folder(self._folder(name))

    def keep(self, attempts: Collection[Attempt]) -> None:
        """Throws away all but what was uploaded for these attempts: for the start, before anything is opened."""
        wanted = {self._folder(attempt) for attempt in attempts}
        with self._lock, files.translated("clearing the spool"), crash.step("spool.keep"):
            for path in self.folder.iterdir():
                if not path.is_dir():
                    path.unlink()
                elif path not in wanted:
                    _remove_folder(path)
            self._left = {}
            for folder in wanted:
                for path in folder.glob("*"):
                    self._left.setdefault(path.name.partition("-")[0], []).append(path)

    def _sync_folder(self, key: UploadKey) -> None:
        attempt = key[:3]
        if attempt in self._broken:
            raise SpoolError("the attempt's folder could not be synced before")
        try:
            with files.translated("syncing the attempt's folder"), crash.step("spool.folder_sync"):
                durable.sync(self._folder(attempt))
        except BlobError as exc:
            self._broken.add(attempt)
            raise SpoolError(str(exc)) from exc

    def _folder(self, attempt: Attempt) -> Path:
        return self.folder / _hashed(attempt)

    def _path(self, key: UploadKey, digest: str) -> Path:
        return path_of(self.folder, key, digest)

    def _find(self, key: UploadKey, digest: str) -> SpoolFile | None:
        with self._lock:
            file = self._files.get(key)
            if file is None and files.is_digest(digest) and (path := self._path(key, digest)).exists():
                file = self._files[key] = SpoolFile(path, digest)
            return file if file is not None and file.digest == digest else None

    def _replace(self, key: UploadKey, digest: str) -> SpoolFile:
        with self._lock, files.translated("opening an upload"):
            earlier = self._files.get(key)
            if earlier is not None and earlier.digest == digest:
                return earlier  # made by somebody else this very moment
            if earlier is not None and earlier.sealed:
                raise UploadError(f"the update {earlier.digest} was reported for this assignment already")
            self._remove(key)
            if self._in_memory(key.job_id):
                file = MemoryFile(digest)
            else:
                self._make_folder(self._folder(key[:3]))
                file = SpoolFile(self._path(key, digest), digest)
            self._files[key] = file
            return file

    def _make_folder(self, folder: Path) -> None:
        if folder.exists():
            return
        with crash.step("spool.new_folder"):
            folder.mkdir()
            try:
                durable.sync(self.folder)
            except BaseException:
                folder.rmdir()
                raise

    def _remove(self, key: UploadKey) -> None:
        for path in self._left.pop(_hashed(key), []):
            path.unlink(missing_ok=True)
        file = self._files.pop(key, None)
        if file is not None:
            with file.lock:
                if (writer := self._writers.get(file)) is not None:
                    writer.fence()
                file.remove()
                file.gone = True


def path_of(folder: Path, key: UploadKey, digest: str) -> Path:
    """Where an update lies in the spool."""
    return folder / _hashed(key[:3]) / f"{_hashed(key)}-{digest}"


def _hashed(names: tuple[object, ...]) -> str:
    # Ids come from outside: a hash is a file name whatever they hold.
    return hashlib.sha256("\n".join(map(str, names)).encode()).hexdigest()


def _remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
