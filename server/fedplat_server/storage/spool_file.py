"""Files that grow while they are received: those of the spool, and those that silos send each other.

An upload may be resumed, and replaces one with another digest.

`RelayStore` has the files for silos without a port of their own, encrypted by the sender for its receiver
(`fedplat.secure_aggregation.relay`). A file stays in the attempt's folder until the attempt ends. If the server's disk
is lost before, only edges of a round are lost. Its `follow` and `close` run on the event loop; all other methods block,
and threads call them.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from fedplat import durable, extras, rounds
from fedplat.model.running_norm import RunningNorm
from fedplat.rounds import Attempt, AttemptKey
from fedplat.wire import digests
from fedplat_server import crash_points, errors
from fedplat_server.errors import UploadError
from fedplat_server.storage import files

CAN_KEEP_IN_MEMORY = hasattr(os, "memfd_create")
"""True if this platform has files in memory (Linux)."""


class SpoolFile:
    """A growing file and the hash of its content. Callers of its methods hold its lock.

    Its name is its declared digest, or an `upload_id` until the report declares the digest; both are "" if unknown.
    `sealed`: it was reported, and does not change. `durable`: it survives a power failure. `gone`: it was removed.
    `norm`: what measures the content while it arrives, if an upload has brought it.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.digest, self.upload_id = ("", name) if files.is_upload_id(name) else (name, "")
        self.received = 0
        self.sealed = False
        self.durable = False
        self.gone = False
        self.norm: RunningNorm | None = None
        self.lock = threading.Lock()
        self._hash = new_hash(name)
        self._loaded = False
        self._failed = False
        self._writeback = files.Writeback()

    def load(self) -> None:
        """Hash the bytes that an earlier process has written, once, and measure those that `norm` lacks."""
        start = self.received if self._loaded else 0
        if self.norm is not None:
            start = min(start, self.norm.position)
        if self._loaded and start == self.received:
            return
        if self.path.exists():
            with self.path.open("rb", buffering=0) as file:
                file.seek(start)
                while part := file.read(files.READ_BYTES):
                    if not self._loaded:
                        self._hash.update(part)
                        self.received += len(part)
                    if self.norm is not None:
                        self.norm.update(part)
        self._loaded = True

    def open_writer(self) -> int:
        """Return a new descriptor for `append`. Raises `OSError`."""
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def append(self, descriptor: int, data: durable.Bytes) -> None:
        """Append the data completely, or leave the file unchanged."""
        try:
            durable.write_all(descriptor, data)
        except BaseException:
            os.ftruncate(descriptor, self.received)  # remove a partial write, which is not hashed
            raise
        self._hash.update(data)
        if self.norm is not None:
            self.norm.update(data)
        self.received += memoryview(data).nbytes
        self._writeback.on_written(descriptor, self.received)

    def restart(self) -> None:
        """Discard the content."""
        os.truncate(self.path, 0)
        self.received = 0
        self._hash = digests.UpdateHash(self._hash.kind)
        if self.norm is not None:
            self.norm.restart()
        self._writeback = files.Writeback()

    def is_named(self, name: str) -> bool:
        """Return whether the file has this digest or this upload_id."""
        return name in (self.digest, self.upload_id) if name else False

    def is_complete(self) -> bool:
        """Return whether the content has the declared digest."""
        return self.has_digest(self.digest)

    def has_digest(self, digest: str) -> bool:
        """Return whether the content has this digest."""
        return self._hash.digest == digest

    def assign_digest(self, digest: str, path: Path) -> None:
        """Declare the digest of a file that has an `upload_id` only, and move the file to `path`."""
        self.path, self.digest = self.path.rename(path), digest

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

    def __init__(self, name: str) -> None:
        self._descriptor = os.memfd_create("update", os.MFD_CLOEXEC)
        super().__init__(Path(f"/proc/self/fd/{self._descriptor}"), name)

    @override
    def assign_digest(self, digest: str, path: Path) -> None:
        self.digest = digest

    @override
    def sync(self) -> None:
        """Do nothing: memory does not outlive the process."""

    @override
    def remove(self) -> None:
        if not self.gone:  # the number of a closed descriptor may belong to another file
            os.close(self._descriptor)


class RowFile(MemoryFile):
    """A small update in memory, which becomes a row of the database when its report is accepted."""

    def __init__(self, digest: str, content: bytes) -> None:
        """`digest` is the SHA-256 of the content."""
        super().__init__(digest)
        try:
            durable.write_all(self._descriptor, content)
        except BaseException:
            self.remove()
            raise
        self.content = content
        self.received = len(content)
        self.sealed = True

    @override
    def load(self) -> None:
        """Do nothing: the content is known."""

    @override
    def is_complete(self) -> bool:
        return True


class OpenUpload:
    """The writer of the remaining bytes of an upload, returned by `spool.Spool.open`."""

    def __init__(self, file: SpoolFile, size_bytes: int, writers: dict[SpoolFile, OpenUpload]) -> None:
        self._file = file
        self._size_bytes = size_bytes
        self._received = file.received
        self._writers = writers
        self._descriptor = file.open_writer()

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

        Raises `UploadError` if bytes are missing, or if they have another digest: then the upload restarts at 0. The
        digest of an upload with an id is not known yet.
        """
        self.close()
        file = self._file
        with file.lock:
            if file.is_complete():
                return file.path
            if self._received < self._size_bytes:
                raise errors.UploadError(f"{self._received} of {self._size_bytes} bytes were received")
            if not file.digest:
                return file.path
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
            if self._file.norm is not None:
                self._file.norm.pause()  # nothing may follow for a long time


def discard(file: SpoolFile, writers: dict[SpoolFile, OpenUpload]) -> None:
    """Fence the writer of a file, and remove the file, which no upload may use again."""
    with file.lock:
        if (writer := writers.get(file)) is not None:
            writer.fence()
        file.remove()
        file.gone = True


def resume_upload(
    file: SpoolFile,
    size_bytes: int,
    offset: int,
    writers: dict[SpoolFile, OpenUpload],
    norm: RunningNorm | None = None,
) -> OpenUpload:
    """Return a new writer of a file after its first `offset` bytes, and fence the one that it has in `writers`.

    The first `norm` of a file measures its content, also what is there already.
    Raises `UploadError` if the file was removed, or has another number of bytes.
    """
    with file.lock:
        if file.gone:
            raise UploadError("the upload was discarded meanwhile; resume at 0")
        if (earlier := writers.get(file)) is not None:
            earlier.fence()
        file.norm = file.norm or norm
        file.load()
        if offset != file.received:
            raise UploadError(f"offset {offset} is not where the upload stopped; resume at {file.received}")
        writer = writers[file] = OpenUpload(file, size_bytes, writers)
        return writer


def new_hash(name: str) -> digests.UpdateHash:
    """Return a hash of the kind of a digest or an `upload_id`. Raises `BlobError` if this server does not have it."""
    kind = digests.kind_of(name)
    if kind and not digests.has_blake3():
        command = extras.install_command("blake3", "fedplat-server")
        raise errors.BlobError(f"an update has a digest of BLAKE3, which this server lacks: {command}")
    return digests.UpdateHash(kind)


def hash_update(path: Path, digest: str) -> str:
    """Return the digest of a file, of the kind of another digest. Raises `BlobError` as `new_hash` does."""
    return digests.hash_file(path, new_hash(digest).kind)


def spool_path_of(folder: Path, key: rounds.AssignmentId, name: str) -> Path:
    """Return the path of an update in a spool's folder; its name is its digest, or its upload_id before its report."""
    return folder / name_attempt(key.attempt) / f"{name_update(key)}-{name}"


def name_attempt(attempt: rounds.AttemptKey) -> str:
    """Return the name of an attempt's folder."""
    return _hash(attempt)


def name_update(key: rounds.AssignmentId) -> str:
    """Return the beginning of the name of an update's file, which its digest or upload_id follows."""
    return _hash((*key.attempt, key.client_id))


def _hash(names: tuple[object, ...]) -> str:
    return hashlib.sha256("\n".join(map(str, names)).encode()).hexdigest()


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
        with files.translate_os_errors("opening a relayed file", "updates"):
            return resume_upload(file, size_bytes, offset, self._writers)

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
            file = self._files[key] = SpoolFile(folder / f"{_hash_relayed(key)}-{digest}", digest)
            return file

    def _find(self, key: RelayedFile) -> SpoolFile | None:
        """Return a file, also one of an earlier process."""
        with self._lock:
            if (file := self._files.get(key)) is None and key.attempt in self._open:
                found = sorted((self.folder / name_attempt(key.attempt)).glob(f"{_hash_relayed(key)}-*"))
                if found:
                    file = self._files[key] = SpoolFile(found[0], found[0].name.rpartition("-")[2])
            return file

    def _remove(self, key: RelayedFile) -> None:
        file = self._files.pop(key, None)
        if file is not None:
            discard(file, self._writers)


def _hash_relayed(key: RelayedFile) -> str:
    return hashlib.sha256("\n".join((key.sender, key.receiver, key.name)).encode()).hexdigest()[:32]
