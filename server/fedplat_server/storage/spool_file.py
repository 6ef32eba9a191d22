"""Files of the spool and their names: on the disk or in memory, growing until their bytes have the declared digest."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

from typing_extensions import override

from fedplat import durable, rounds
from fedplat_server import crash_points, errors
from fedplat_server.storage import files

CAN_KEEP_IN_MEMORY = hasattr(os, "memfd_create")
"""True if this platform has files in memory (Linux)."""


class SpoolFile:
    """A growing file and the hash of its content. Callers of its methods hold its lock.

    `sealed`: it was reported, and does not change. `durable`: it survives a power failure. `gone`: it was removed.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        self.received = 0
        self.sealed = False
        self.durable = False
        self.gone = False
        self.lock = threading.Lock()
        self._sha256 = hashlib.sha256()
        self._loaded = False
        self._failed = False
        self._writeback = files.Writeback()

    def load(self) -> None:
        """Hash the bytes that an earlier process has written, once."""
        if self._loaded:
            return
        if self.path.exists():
            with self.path.open("rb", buffering=0) as file:
                while part := file.read(files.READ_BYTES):
                    self._sha256.update(part)
                    self.received += len(part)
        self._loaded = True

    def append(self, descriptor: int, data: durable.Bytes) -> None:
        """Append the data completely, or leave the file unchanged."""
        try:
            durable.write_all(descriptor, data)
        except BaseException:
            os.ftruncate(descriptor, self.received)  # remove a partial write, which is not hashed
            raise
        self._sha256.update(data)
        self.received += memoryview(data).nbytes
        self._writeback.on_written(descriptor, self.received)

    def restart(self) -> None:
        """Discard the content."""
        os.truncate(self.path, 0)
        self.received = 0
        self._sha256 = hashlib.sha256()
        self._writeback = files.Writeback()

    def is_complete(self) -> bool:
        """Return whether the content has the declared digest."""
        return self._sha256.hexdigest() == self.digest

    def sync(self) -> None:
        """Make the content durable against power failures. After a failure it fails forever. Raises `OSError`."""
        if self._failed:
            raise OSError(errno.EIO, "an earlier sync of the file failed")
        self._failed = True
        with crash_points.step("spool.sync"):
            durable.sync(self.path)
        self._failed = False

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)


class MemoryFile(SpoolFile):
    """A file in memory, which has a path but is never on the disk, and ends with the process."""

    def __init__(self, digest: str) -> None:
        self._descriptor = os.memfd_create("update", os.MFD_CLOEXEC)
        super().__init__(Path(f"/proc/self/fd/{self._descriptor}"), digest)

    @override
    def sync(self) -> None:
        """Do nothing: memory does not outlive the process."""

    @override
    def remove(self) -> None:
        if not self.gone:  # the number of a closed descriptor may belong to another file
            os.close(self._descriptor)


class OpenUpload:
    """The writer of the remaining bytes of an upload, returned by `spool.Spool.open`."""

    def __init__(self, file: SpoolFile, size_bytes: int, writers: dict[SpoolFile, OpenUpload]) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._received = file.received
        self._writers = writers
        self._descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    @property
    def received(self) -> int:
        """The number of bytes received, as of the last write of this writer."""
        return self._received

    def write(self, data: durable.Bytes) -> None:
        """Append bytes.

        Raises `UploadError` if the upload exceeds its declared size, was reported already, or has another writer, and
        `BlobFullError` or `BlobError` if the bytes cannot be stored.
        """
        with self._file.lock:
            if self._writers.get(self._file) is not self:
                raise errors.UploadError("the upload has ended, or another call continues it")
            if self._file.sealed:
                raise errors.UploadError("the update was reported already")
            if self._received + memoryview(data).nbytes > self._size_bytes:
                raise errors.UploadError(f"there are more bytes than the declared {self._size_bytes}")
            with files.translate_os_errors("writing an upload", "updates"), crash_points.step("upload.append"):
                self._file.append(self._descriptor, data)
            self._received = self._file.received

    def finish(self) -> Path:
        """Close the upload and return the path of the complete file.

        Raises `UploadError` if bytes are missing, or if they have another digest: then the upload restarts at 0.
        """
        self.close()
        file = self._file
        with file.lock:
            if file.is_complete():
                return file.path
            if self._received < self._size_bytes:
                raise errors.UploadError(f"{self._received} of {self._size_bytes} bytes were received")
            if not file.gone:
                with files.translate_os_errors("restarting an upload", "updates"):
                    file.restart()
            raise errors.UploadError(f"the bytes received are not those of {file.digest}; resume at 0")

    def close(self) -> None:
        """Stop writing; the received bytes are kept. May be repeated."""
        with self._file.lock:
            self.fence()

    def fence(self) -> None:
        """Stop writing, as `close` does. The caller holds the file's lock."""
        if self._writers.get(self._file) is self:
            del self._writers[self._file]
            os.close(self._descriptor)


def spool_path_of(folder: Path, key: rounds.AssignmentId, digest: str) -> Path:
    """Return the path of an update in a spool's folder."""
    return folder / name_attempt(key.attempt) / f"{name_update(key)}-{digest}"


def name_attempt(attempt: rounds.AttemptKey) -> str:
    """Return the name of an attempt's folder."""
    return _hash(attempt)


def name_update(key: rounds.AssignmentId) -> str:
    """Return the beginning of the name of an update's file, which its digest follows."""
    return _hash((*key.attempt, key.client_id))


def _hash(names: tuple[object, ...]) -> str:
    return hashlib.sha256("\n".join(map(str, names)).encode()).hexdigest()
