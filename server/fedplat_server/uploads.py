"""Resumable uploads: one file for each client and attempt, which grows until its bytes have the promised digest.

An upload ends with the process (`clear`), so nothing is synced. Everything here blocks: asyncio calls it in
threads, several at once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from pathlib import Path
from typing import NamedTuple

from fedplat_server import crash, files
from fedplat_server.errors import UploadError


class UploadKey(NamedTuple):
    """Names an upload."""

    job_id: str
    round: int
    attempt: int
    client_id: str


class _File:
    """A file that grows, and the hash of what is in it. Its methods need its lock."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        self.received = 0
        self.sha256 = hashlib.sha256()
        self.sealed = False
        self.writer: Upload | None = None
        self.lock = threading.Lock()

    def rehash(self) -> None:
        """Takes up what is on the disk already."""
        with self.path.open("rb", buffering=0) as file:
            while part := file.read(files.READ_BYTES):
                self.sha256.update(part)
                self.received += len(part)

    def append(self, descriptor: int, data: files.Bytes) -> None:
        try:
            files.write_all(descriptor, data)
        except BaseException:
            os.ftruncate(descriptor, self.received)  # a part may be there; what was hashed is what counts
            raise
        self.sha256.update(data)
        self.received += memoryview(data).nbytes

    def restart(self) -> None:
        os.truncate(self.path, 0)
        self.received = 0
        self.sha256 = hashlib.sha256()

    def is_complete(self) -> bool:
        return self.sha256.hexdigest() == self.digest


class Upload:
    """Where the rest of an upload is written to; made by `UploadStore.open`."""

    def __init__(self, file: _File, size_bytes: int) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._received = file.received
        self._descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @property
    def received(self) -> int:
        """How many bytes there were when this last wrote."""
        return self._received

    def write(self, data: files.Bytes) -> None:
        """Appends bytes.

        Raises `UploadError` if they are more than were declared, or if another writer has taken over, and
        `BlobFullError` or `BlobError` if they cannot be stored.
        """
        with self._file.lock:
            if self._file.writer is not self:
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
            with files.translated("restarting an upload"):
                file.restart()
            raise UploadError(f"the bytes received are not those of {file.digest}; resume at 0")

    def close(self) -> None:
        """Ends the writing; what was received stays. May be called again."""
        with self._file.lock:
            self.fence()

    def fence(self) -> None:
        """Does what `close` does, for those who hold the file's lock."""
        if self._file.writer is self:
            self._file.writer = None
            os.close(self._descriptor)


class UploadStore:
    """Uploads in a folder of their own, which is made if it is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()  # taken before the lock of a file, never after
        self._files: dict[UploadKey, _File] = {}
        with files.translated(f"making the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def received(self, key: UploadKey, digest: str) -> int:
        """How many of these bytes there are: where to resume."""
        with self._lock:
            file = self._find(key, digest)
            return file.received if file is not None else 0

    def open(self, key: UploadKey, digest: str, size_bytes: int, offset: int, limit_bytes: int | None = None) -> Upload:
        """Goes on with an upload, or starts it. An upload of other bytes is thrown away; another writer is fenced.

        Raises `UploadError` if the declared size is beyond the limit, if the offset is not where the upload
        stopped, or if other bytes were taken as complete before.
        """
        if not files.is_digest(digest):
            raise UploadError(f"{digest[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
        if size_bytes < 0 or (limit_bytes is not None and size_bytes > limit_bytes):
            raise UploadError(f"{size_bytes} bytes were declared; at most {limit_bytes} are accepted")
        with self._lock, files.translated("opening an upload"):
            file = self._find(key, digest) or self._replace(key, digest)
            with file.lock:
                if file.writer is not None:
                    file.writer.fence()
                if offset != file.received:
                    raise UploadError(f"offset {offset} is not where the upload stopped; resume at {file.received}")
                file.writer = Upload(file, size_bytes)
                return file.writer

    def complete(self, key: UploadKey, digest: str) -> Path | None:
        """The file, if all bytes are there. From now on they stay as they are, until they are discarded."""
        with self._lock:
            file = self._find(key, digest)
            if file is None:
                return None
            with file.lock:
                if not file.is_complete():
                    return None
                if file.writer is not None:
                    file.writer.fence()
                file.sealed = True
                return file.path

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
            _remove_folder(self._folder(UploadKey(job_id, round_, attempt, "")))

    def clear(self) -> None:
        """Throws everything away: for the start, when no attempt goes on."""
        with self._lock, files.translated("clearing the uploads"), crash.step("spool.clear"):
            for key in list(self._files):
                self._remove(key)
            _remove_folder(self.folder)
            self.folder.mkdir(parents=True)

    def _folder(self, key: UploadKey) -> Path:
        return self.folder / _hashed(key[:3])

    def _path(self, key: UploadKey, digest: str) -> Path:
        return self._folder(key) / f"{_hashed(key)}-{digest}"

    def _find(self, key: UploadKey, digest: str) -> _File | None:
        file = self._files.get(key)
        if file is None and files.is_digest(digest) and (path := self._path(key, digest)).exists():
            file = _File(path, digest)
            with files.translated("reading an upload"):
                file.rehash()
            self._files[key] = file
        return file if file is not None and file.digest == digest else None

    def _replace(self, key: UploadKey, digest: str) -> _File:
        earlier = self._files.get(key)
        if earlier is not None and earlier.sealed:
            raise UploadError(f"the update {earlier.digest} was reported for this assignment already")
        self._remove(key)
        self._folder(key).mkdir(exist_ok=True)
        file = self._files[key] = _File(self._path(key, digest), digest)
        return file

    def _remove(self, key: UploadKey) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            with file.lock:
                if file.writer is not None:
                    file.writer.fence()
                file.path.unlink(missing_ok=True)


def _hashed(names: tuple[object, ...]) -> str:
    # Ids come from outside: a hash is a file name whatever they hold.
    return hashlib.sha256("\n".join(map(str, names)).encode()).hexdigest()


def _remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
