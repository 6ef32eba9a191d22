"""What an upload is written to: a file in the spool, or memory that has a path but never touches the disk."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

from fedplat import durable
from fedplat_server import crash, files

CAN_KEEP_IN_MEMORY = hasattr(os, "memfd_create")
"""Whether this platform has files in memory (Linux)."""


class SpoolFile:
    """A file that grows, and the hash of what is in it. Its methods need its lock.

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
        """Takes up what an earlier process has written."""
        if self._loaded:
            return
        if self.path.exists():
            with self.path.open("rb", buffering=0) as file:
                while part := file.read(files.READ_BYTES):
                    self._sha256.update(part)
                    self.received += len(part)
        self._loaded = True

    def append(self, descriptor: int, data: durable.Bytes) -> None:
        """Writes all of the data, or nothing that counts."""
        try:
            durable.write_all(descriptor, data)
        except BaseException:
            os.ftruncate(descriptor, self.received)  # a part may be there; what was hashed is what counts
            raise
        self._sha256.update(data)
        self.received += memoryview(data).nbytes
        self._writeback.grown(descriptor, self.received)

    def restart(self) -> None:
        """Throws away what is in it."""
        os.truncate(self.path, 0)
        self.received = 0
        self._sha256 = hashlib.sha256()
        self._writeback = files.Writeback()

    def is_complete(self) -> bool:
        """Whether its bytes are those of the digest."""
        return self._sha256.hexdigest() == self.digest

    def sync(self) -> None:
        """Makes its bytes outlive a power failure. After one failure it fails for ever."""
        if self._failed:
            raise OSError(errno.EIO, "a sync of it has failed before")
        self._failed = True
        with crash.step("spool.sync"):
            durable.sync(self.path)
        self._failed = False

    def remove(self) -> None:
        """Throws it away."""
        self.path.unlink(missing_ok=True)


class MemoryFile(SpoolFile):
    """The same in memory, which goes with the process."""

    def __init__(self, digest: str) -> None:
        self._descriptor = os.memfd_create("update", os.MFD_CLOEXEC)
        super().__init__(Path(f"/proc/self/fd/{self._descriptor}"), digest)

    def sync(self) -> None:
        """Nothing outlives anything here."""

    def remove(self) -> None:
        """Frees the memory."""
        if not self.gone:  # the number may be another file's by then
            os.close(self._descriptor)
