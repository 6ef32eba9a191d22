"""The spool: the updates that clients send, from the first byte until no attempt needs them.

Only the spool deletes updates. Stored changes (`on_stored`) determine which ones are needed: those of open
assignments, and those that the open attempt has accepted. It refuses all others, and deletes them in the background; so
a file is deleted after the change that makes it obsolete is stored, and a late upload does not create a new one.
Without a stored change it removes only bytes that the client sends again or that are folded already:

- an update that was not reported, when an upload with another name begins (`open`), and the content of an upload that
  is complete but does not have its declared digest (`OpenUpload.finish`, `complete`);
- the end of a file that a failed write has left (`SpoolFile.append`);
- an update whose sync failed (`persist`);
- an update in memory that was folded (`discard`).

An upload may be resumed: its file grows until its bytes have the declared digest. A client that knows the digest only
after it has sent the bytes names the upload by a random id. Then the report declares the digest, and until it does, the
file is not complete.

The files of jobs with `durability = "spool"` are in one folder per attempt and outlive the process: an update is
durable (`persist`) before its report is accepted. Where it is durable depends on the backend (`spool_backend`): in the
synced folder, or as a copy in an object store. With a store the folder is only a cache of durable updates: `complete`
gets what it lacks from the store. Uploads without a report are in the folder alone. The files of jobs with `durability
= "memory"` are in memory, and have no copies.

A small update that comes inside its report has no file: it is in memory, and becomes a row of the database in the
transaction that accepts the report (`hold_row`, `database.sql_contents`). A start gets it from there (`restore_rows`).
One of middle size has no file either: it is received into a segment that many share, and becomes durable with others
(`store`, `segments`). There it is also read (`locate`). Only if it is uploaded again does it get a file.

`on_stored`, `store`, `close` and `run_in_thread` run on the event loop; all other methods block, and threads call them,
several at once. No lock is held while the backend works, which may take long.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import resource
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from fedplat import durable
from fedplat.model.file import FilePart
from fedplat.model.running_norm import RunningNorm
from fedplat.rounds import AssignmentId, Change
from fedplat.rounds.closing import needs_update
from fedplat_server import crash_points, logs
from fedplat_server.errors import BlobError, UploadError
from fedplat_server.storage import files
from fedplat_server.storage.segments import RecordFile, Segments
from fedplat_server.storage.spool_backend import FolderBackend, SpoolBackend
from fedplat_server.storage.spool_file import (
    CAN_KEEP_IN_MEMORY,
    MemoryFile,
    OpenUpload,
    RowFile,
    SpoolFile,
    hash_update,
    name_attempt,
    name_update,
    resume_upload,
    spool_path_of,
)
from fedplat_server.storage.update_files import UpdateFiles

PREFETCH_THREADS = 4
MAX_ROWS = 2000
"""Maximum number of updates that are in memory because they are rows; and a quarter of the open files that the process
may have, since each is one. Others get files."""
MAX_HANDED_BYTES = 64 * 2**20  # of records that also get files when the server stops, which delays its end
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Spool:
    """The updates of all jobs, in a folder that is created if it does not exist. Its default `backend` is the folder.

    Updates of jobs for which `in_memory(job_id)` returns True are in memory. Without `segments` there are no records.
    """

    def __init__(
        self,
        folder: Path,
        in_memory: Callable[[str], bool] = lambda _: False,
        backend: SpoolBackend | None = None,
        segments: Segments | None = None,
    ) -> None:
        self.folder = folder
        self.stores_row: Callable[[AssignmentId, int], bool] = lambda key, size_bytes: False
        """Whether the server stores an update of a size as a row. Not if other processes read it, by its path."""
        self._in_memory = in_memory
        self._backend = backend or FolderBackend()
        self._updates = UpdateFiles(folder)
        self._lock = self._updates.lock
        self._fetching: dict[AssignmentId, threading.Lock] = {}  # taken before all other locks
        self._to_fetch: deque[tuple[AssignmentId, str]] = deque()
        self._rows: dict[AssignmentId, RowFile] = {}
        self.segments = segments
        num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_rows = MAX_ROWS if num_files == resource.RLIM_INFINITY else min(MAX_ROWS, num_files // 4)
        self._deletions: set[asyncio.Task[None]] = set()
        with files.translate_os_errors(f"making the folder {folder}", "updates"):
            durable.make_folder(folder)

    def expect(self, needed: Iterable[AssignmentId]) -> None:
        """Start to accept uploads for these assignments."""
        for each in needed:
            self._updates.expect(each)

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Expect the updates that stored changes make necessary; delete those that they make obsolete."""
        obsolete: list[AssignmentId] = []
        for change in changes:
            attempt = change.attempt
            ended = attempt.assignments.values() if attempt is not None and not attempt.is_open else ()
            for each in (*change.assignments, *ended):
                if needs_update(change.job, each):
                    self.expect([each.id])
                elif self._updates.forget(each.id):
                    obsolete.append(each.id)
        if obsolete:
            task = asyncio.create_task(self._delete_in_background(obsolete), name="delete updates")
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    def keep(self, needed: Sequence[AssignmentId], known: Collection[str] = ()) -> None:
        """Expect these updates, delete the others of `known` attempts, and set those of unknown attempts aside.

        `known` has names (`name_attempt`). Only for the start, before any upload is opened.
        Raises `BlobError`, of which `BlobUnavailableError` may end by itself.
        """
        self.expect(needed)
        files.expire_set_aside(self.folder)
        names: dict[str, set[str]] = {}
        for each in needed:
            names.setdefault(name_attempt(each.attempt), set()).add(name_update(each))
        with self._lock, files.translate_os_errors("clearing the spool", "updates"), crash_points.step("spool.keep"):
            files.clear_set_aside(self.folder, names, known, files.is_digest)
            for name, updates in names.items():
                if (self.folder / name).is_dir():
                    self._updates.keep(self.folder / name, updates)
            if names:
                durable.sync(self.folder)  # an earlier process may have been killed before it had synced a new folder
        if self.segments is not None:
            self.segments.keep(needed, known)
        copies = self._backend.keep(needed, known)
        if (threads := self._backend.threads) is not None:
            num_copies = Counter(key for key, _ in copies)  # of two, only a report or the aggregation knows which
            # So that the first fold need not wait for each in turn.
            self._to_fetch.extend((key, digest) for key, digest in copies if num_copies[key] == 1)
            for _ in range(PREFETCH_THREADS):
                threads.submit(self._prefetch)

    def expire(self) -> None:
        """Remove the updates that were set aside long enough ago."""
        files.expire_set_aside(self.folder)
        if self.segments is not None:
            self.segments.expire()
        self._backend.expire()

    async def close(self) -> None:
        """Wait for pending deletions."""
        self._to_fetch.clear()
        await asyncio.gather(*self._deletions, return_exceptions=True)
        if self.segments is not None:
            await self.segments.close()
        self._backend.close()

    async def run_in_thread(
        self, key: AssignmentId, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Call a function that may `persist` or fetch this update, in a thread that may wait for the backend."""
        threads = None if self._in_memory(key.attempt.job_id) else self._backend.threads
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def count_received(self, key: AssignmentId, name: str) -> int:
        """Return how many bytes of this update were received, where an upload resumes; `name` as in `open`."""
        file = self._find(key, name)
        if file is None:
            return 0
        with file.lock, files.translate_os_errors("reading an upload", "updates"):
            file.load()
            return file.received

    def open(
        self, key: AssignmentId, name: str, size_bytes: int, offset: int, norm: RunningNorm | None = None
    ) -> OpenUpload:
        """Resume or start an upload. An upload with another name is discarded; another writer is fenced.

        `name` is the update's digest, or the client's `upload_id` if the digest follows the bytes (`complete`). `norm`
        measures the bytes while they arrive (`find_norm`).
        Raises `UploadError` if the assignment has ended, if the upload did not stop at `offset`, or if an update with
        another name was sealed for this assignment.
        """
        if not files.names_update(name):
            raise UploadError(f"{name[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
        file = self._find(key, name) or self._replace(key, name, size_bytes)
        with files.translate_os_errors("opening an upload", "updates"):
            return resume_upload(file, size_bytes, offset, self._updates.writers, norm)

    def complete(self, key: AssignmentId, digest: str, upload_id: str = "") -> Path | None:
        """Seal and return the file if it is complete, else return None. A sealed file does not change until deleted.

        An upload with this `upload_id` gets the digest, which its report declares, if its bytes have it. An update that
        the folder lacks is fetched from the backend. Raises `BlobError`, of which `BlobUnavailableError` may end by
        itself.
        """
        if upload_id:
            self._assign_digest(key, upload_id, digest)
        path = self._find_complete(key, digest, seal=True)
        if path is None and self._backend.has_copy(key, digest):
            self._fetch(key, digest)
            path = self._find_complete(key, digest, seal=True)
        return path

    def _assign_digest(self, key: AssignmentId, upload_id: str, digest: str) -> None:
        """Give an upload that has an id the digest of its report; if its bytes have another one, discard them."""
        file = self._find(key, upload_id)
        if file is None:
            return
        with file.lock, files.translate_os_errors("reading an upload", "updates"):
            file.load()  # not below, where others would wait for the spool's lock until all bytes are hashed
        with self._lock, file.lock, files.translate_os_errors("naming an upload", "updates"):
            if file.gone or file.digest or not file.received:  # an upload that never began has no file
                return
            if (writer := self._updates.writers.get(file)) is not None:
                writer.fence()
            if file.has_digest(digest):
                with crash_points.step("upload.name"):
                    file.assign_digest(digest, spool_path_of(self.folder, key, digest))
            else:  # a power failure took some, or the client sent others: it resumes at 0
                logs.get().warning(
                    "an upload has another digest than its report", client=key.client_id, received=file.received
                )
                file.restart()

    def _find_complete(self, key: AssignmentId, digest: str, *, seal: bool) -> Path | None:
        file = self._find(key, digest)
        if file is None:
            return None
        with file.lock, files.translate_os_errors("reading an upload", "updates"):
            file.load()
            if file.gone or not file.is_complete():
                return None
            if seal:
                if (writer := self._updates.writers.get(file)) is not None:
                    writer.fence()
                file.sealed = True
            return file.path

    def find_norm(self, key: AssignmentId, digest: str) -> RunningNorm | None:
        """Return what has measured a sealed update while it arrived, if anything has."""
        with self._lock:
            file = self._updates.files.get(key)
        return file.norm if file is not None and file.is_named(digest) else None

    def unseal(self, key: AssignmentId, digest: str) -> None:
        """Let another upload replace an update whose report was not accepted."""
        with self._lock:
            file = self._updates.files.get(key)
        if file is not None and file.is_named(digest):
            with file.lock:
                file.sealed = False

    def persist(self, key: AssignmentId, digest: str) -> int:
        """Make a complete update durable, and return its size in bytes. Repetition is free.

        A failed sync is never retried: the kernel may have dropped the data that it could not write, and would report
        success. The update is discarded, to be sent again; after any other failure it stays, to be reported again.
        Raises `UploadError` if the update is missing, `BlobFullError`, `BlobUnavailableError` or `BlobError` if it
        cannot be stored, and `SpoolError` if the attempt's folder cannot be trusted.
        """
        if (record := self._find_record(key, digest)) is not None:
            return record.size_bytes or 0
        file = self._find(key, digest)
        if file is None:
            raise UploadError("the update is missing; resume at 0")
        try:
            with file.lock, files.translate_os_errors("syncing an update", "updates"):
                if file.gone:
                    raise UploadError("the update is missing; resume at 0")
                if isinstance(file, RowFile | RecordFile):  # only a transaction, or `store`, makes it durable
                    raise UploadError("the update was replaced meanwhile; report it again")
                if file.durable:
                    return file.received
                file.sync()
        except BlobError:
            self.discard(key)
            raise
        if not isinstance(file, MemoryFile):
            try:
                self._backend.make_durable(key, digest, file.path)
            finally:
                if not self._updates.is_needed(key):  # its deletion may have been faster than the copy
                    self._backend.delete([key])
        file.durable = True
        return file.received

    def find_open(self, key: AssignmentId, digest: str) -> RecordFile | None:
        """Return the record of an update that must be stored before it is acknowledged; None if it is durable."""
        with self._lock:
            file = self._updates.files.get(key)
            return file if isinstance(file, RecordFile) and file.digest == digest else None

    async def store(self, key: AssignmentId, digest: str) -> None:
        """Make the update of a record durable, with all that wait for the same.

        Raises `UploadError` if it was removed. After `BlobFullError` or `BlobError` it must be sent again.
        """
        file = self._updates.files.get(key)
        if self.segments is None or not isinstance(file, RecordFile) or file.digest != digest:
            raise UploadError("the update was replaced meanwhile; report it again")
        await self.segments.store(key, file, functools.partial(self._drop, key, file))
        if not self._updates.is_needed(key):  # it ended meanwhile: the deletion may have been faster than the sync
            await asyncio.to_thread(self.segments.release, [key])

    def _drop(self, key: AssignmentId, file: RecordFile) -> None:
        with self._lock:
            if self._updates.files.get(key) is file:
                self._remove(key)

    def locate(self, key: AssignmentId, digest: str, upload_id: str = "") -> FilePart | None:
        """Return where the bytes of a complete update are, sealed as by `complete`; None if it is missing."""
        part = self._find_record(key, digest)
        if part is None and (path := self.complete(key, digest, upload_id)) is not None:
            record = self.find_open(key, digest)
            part = record.part if record is not None else FilePart(path.absolute())
        return part

    def discard(self, key: AssignmentId) -> None:
        """Delete an update, which may be sent again, or was folded and is only in memory."""
        with (
            self._lock,
            files.translate_os_errors("deleting an update", "updates"),
            crash_points.step("upload.discard"),
        ):
            self._remove(key)

    def hold_row(self, key: AssignmentId, digest: str, content: bytes, *, at_once: bool = False) -> bool:
        """Keep a complete update in memory until it is a row; return False if it needs a file. Replaces parts of it.

        The event loop calls it with `at_once`: then also False if it would have to wait, or to remove a file. Raises
        `UploadError` if the assignment has ended, or if an update with another digest was sealed for it.
        """
        must_wait = at_once and (self._lock.locked() or key in self._updates.files or self._updates.has_leftovers)
        if must_wait or not (self._backend.takes_rows and self.stores_row(key, len(content))):
            return False
        with self._lock, files.translate_os_errors("opening an upload", "updates"):
            earlier = self._updates.find_earlier(key, digest)
            if isinstance(earlier, RowFile) and earlier.digest == digest:
                return True
            if (earlier is not None and earlier.sealed) or not self._has_room():
                return False  # an earlier report of a sealed file may be about to count
            row = RowFile(digest, content)
            self._remove(key)
            self._updates.files[key] = self._rows[key] = row
            return True

    def find_row(self, key: AssignmentId, digest: str) -> bytes | None:
        """Return the content of an update that must be a row before it is acknowledged; None if it has a file."""
        with self._lock:
            file = self._rows.get(key)
        return file.content if file is not None and file.digest == digest else None

    def restore_rows(self, found: Mapping[AssignmentId, tuple[str, bytes]]) -> None:
        """Keep the updates of rows, with their digests, in memory, or in files if there are too many. For the start."""
        for key, (digest, content) in found.items():
            if hashlib.sha256(content).hexdigest() != digest:
                logs.get().error("the row of an update is damaged", client=key.client_id, digest=digest)
                continue
            with self._lock, files.translate_os_errors("restoring an update", "updates"):
                self._remove(key)  # a file is at most a copy
                if self._has_room():
                    self._updates.files[key] = self._rows[key] = RowFile(digest, content)
                else:
                    self._updates.files[key] = self._updates.write(key, digest, content)
                    self._updates.files[key].durable = True

    def hand_over(self) -> None:
        """Write the updates of rows, and records if they are few, to files, too, for a daemon of an older release."""
        with self._lock:
            rows = {key: file for key, file in self._rows.items() if self._updates.is_needed(key)}
        for key, row in rows.items():
            self._hand_over(key, row.digest, row.content)
        records = self.segments.list_records() if self.segments is not None else {}
        if sum(part.size_bytes or 0 for _, part in records.values()) <= MAX_HANDED_BYTES:
            for key, (digest, part) in records.items():
                if self._updates.is_needed(key):
                    self._hand_over(key, digest, part)

    def _hand_over(self, key: AssignmentId, digest: str, content: bytes | FilePart) -> None:
        with files.translate_os_errors("handing an update over", "updates"):
            with self._lock:
                file = self._updates.write(key, digest, content if isinstance(content, bytes) else content.read())
            durable.sync(file.path)
            self._backend.make_durable(key, digest, file.path)

    def _has_room(self) -> bool:
        return CAN_KEEP_IN_MEMORY and len(self._rows) < self._max_rows

    async def _delete_in_background(self, obsolete: Sequence[AssignmentId]) -> None:
        try:
            # Unlinking gigabytes must not block the event loop.
            await asyncio.to_thread(self._delete, obsolete)
        except BlobError as exc:  # harmless for the round; the next start clears the folder
            logs.get().error("updates could not be deleted", updates=len(obsolete), error=str(exc))
        await asyncio.get_running_loop().run_in_executor(self._backend.threads, self._backend.delete, obsolete)

    def _delete(self, obsolete: Sequence[AssignmentId]) -> None:
        """Delete updates, and the folders of attempts that need no updates."""
        for key in obsolete:
            self.discard(key)
        if self.segments is not None:
            self.segments.release(obsolete)
        for attempt in dict.fromkeys(key.attempt for key in obsolete):
            with self._lock, files.translate_os_errors("deleting the folder of an attempt", "updates"):
                if not self._updates.has_needed(attempt):
                    self._backend.forget(attempt)
                    self._updates.remove_folder(attempt)

    def _remove(self, key: AssignmentId) -> None:
        self._fetching.pop(key, None)
        self._rows.pop(key, None)
        self._updates.remove(key)

    def _fetch(self, key: AssignmentId, digest: str) -> None:
        """Get an update from the backend, which the folder never had, or has lost or damaged."""
        with self._lock:
            fetching = self._fetching.setdefault(key, threading.Lock())
        temporary = self.folder / f".{uuid.uuid4().hex}.tmp"  # the next start removes what a crash leaves
        with fetching, files.translate_os_errors("fetching an update", "updates"):
            if self._find_complete(key, digest, seal=False) is not None:
                return
            try:
                self._backend.fetch(key, digest, temporary)
                found = hash_update(temporary, digest)
                if found != digest:
                    raise BlobError(f"the copy of an update has the digest {found}; expected {digest}")
                with self._lock:
                    earlier = self._updates.files.get(key)
                    if self._updates.is_needed(key) and (earlier is None or not earlier.sealed):
                        self._remove(key)  # a part of an upload that began again, or another one never reported
                        self._updates.adopt(key, digest, temporary)
            finally:
                temporary.unlink(missing_ok=True)

    def _prefetch(self) -> None:
        """Fetch the updates that the start has found, one by one."""
        try:
            while True:
                self._fetch(*self._to_fetch.popleft())  # not sealed: the client may send another update
        except IndexError:
            return
        except BlobError as exc:  # they are fetched when they are needed
            logs.get().warning("updates were not fetched yet", updates=len(self._to_fetch) + 1, error=str(exc))

    def _find_record(self, key: AssignmentId, digest: str) -> FilePart | None:
        return self.segments.find(key, digest) if self.segments is not None else None

    def _find(self, key: AssignmentId, name: str) -> SpoolFile | None:
        with self._lock:
            file = self._updates.files.get(key)
            if file is not None and file.gone:  # the sync of its segment failed
                self._remove(key)
                file = None
            if file is None and files.names_update(name):
                path = spool_path_of(self.folder, key, name)
                part = self._find_record(key, name)
                if part is not None:  # its report is repeated; a file is at most a copy
                    with files.translate_os_errors("reading an update", "updates"):
                        file = self._updates.files[key] = self._updates.write(key, name, part.read())
                    file.durable = True
                elif path.exists():
                    file = self._updates.files[key] = SpoolFile(path, name)
            return file if file is not None and file.is_named(name) else None

    def _replace(self, key: AssignmentId, name: str, size_bytes: int) -> SpoolFile:
        with self._lock, files.translate_os_errors("opening an upload", "updates"):
            earlier = self._updates.find_earlier(key, name)
            if earlier is not None and earlier.is_named(name):
                return earlier  # a concurrent call has just created it
            self._remove(key)
            if self._in_memory(key.attempt.job_id):
                file = MemoryFile(name)
            elif self.segments is not None and (record := self.segments.open(key, name, size_bytes)) is not None:
                file = record
            else:
                self._updates.make_folder(key.attempt)
                file = SpoolFile(spool_path_of(self.folder, key, name), name)
            self._updates.files[key] = file
            return file
