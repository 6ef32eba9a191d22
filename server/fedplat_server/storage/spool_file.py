"""Files of the spool: they grow until their bytes have the promised digest, on the disk or in memory."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

from fedplat import durable
from fedplat_server import crash_points
from fedplat_server.errors import UploadError
from fedplat_server.storage import files

CAN_KEEP_IN_MEMORY = hasattr(os, "memfd_create")
"""Whether this platform has files in memory (Linux)."""


class SpoolFile:
    """A file that grows, and the hash of its content. Its methods need its lock.

    `sealed`: it was reported, and stays as it is. `durable`: it outlives a power failure. `gone`: it was removed.
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
        """Read what an earlier process has written."""
        if self._loaded:
            return
        if self.path.exists():
            with self.path.open("rb", buffering=0) as file:
                while part := file.read(files.READ_BYTES):
                    self._sha256.update(part)
                    self.received += len(part)
        self._loaded = True

    def append(self, descriptor: int, data: durable.Bytes) -> None:
        """Write all of the data, or nothing that counts."""
        try:
            durable.write_all(descriptor, data)
        except BaseException:
            os.ftruncate(descriptor, self.received)  # a part may be there; what was hashed is what counts
            raise
        self._sha256.update(data)
        self.received += memoryview(data).nbytes
        self._writeback.on_written(descriptor, self.received)

    def restart(self) -> None:
        """Throw away the content."""
        os.truncate(self.path, 0)
        self.received = 0
        self._sha256 = hashlib.sha256()
        self._writeback = files.Writeback()

    def is_complete(self) -> bool:
        """Return whether its bytes are those of the digest."""
        return self._sha256.hexdigest() == self.digest

    def sync(self) -> None:
        """Make its bytes outlive a power failure. After one failure it fails for ever."""
        if self._failed:
            raise OSError(errno.EIO, "a sync of it has failed before")
        self._failed = True
        with crash_points.step("spool.sync"):
            durable.sync(self.path)
        self._failed = False

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)


class MemoryFile(SpoolFile):
    """A file in memory, which has a path but never touches the disk, and goes with the process."""

    def __init__(self, digest: str) -> None:
        self._descriptor = os.memfd_create("update", os.MFD_CLOEXEC)
        super().__init__(Path(f"/proc/self/fd/{self._descriptor}"), digest)

    def sync(self) -> None:
        """Do nothing: no memory outlives the process."""

    def remove(self) -> None:
        """Free the memory."""
        if not self.gone:  # the number may be another file's by then
            os.close(self._descriptor)


class OpenUpload:
    """Where the rest of an upload is written to; made by `spool.Spool.open`."""

    def __init__(self, file: SpoolFile, size_bytes: int, writers: dict[SpoolFile, OpenUpload]) -> None:
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
        """Append bytes.

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
            with files.translate_os_errors("writing an upload"), crash_points.step("upload.append"):
                self._file.append(self._descriptor, data)
            self._received = self._file.received

    def finish(self) -> Path:
        """End the writing, and return the file if all bytes are there.

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
                with files.translate_os_errors("restarting an upload"):
                    file.restart()
            raise UploadError(f"the bytes received are not those of {file.digest}; resume at 0")

    def close(self) -> None:
        """End the writing; what was received stays. May be called again."""
        with self._file.lock:
            self.fence()

    def fence(self) -> None:
        """Do the same as `close`, for callers that hold the file's lock."""
        if self._writers.get(self._file) is self:
            del self._writers[self._file]
            os.close(self._descriptor)
