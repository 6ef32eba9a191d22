"""Updates of middle size in files that many share, so that one sync makes all updates that wait durable.

A segment is a file of records, each a header and the bytes of an update, of one job at a time. An update is received
into a record of its own. When it is reported, its header gets its digest, and all reports of the job that arrive
together share one sync, before they are accepted. A record begins on a page of its own: no later write touches a page
of an acknowledged one. The header has the names of the attempt and the assignment; so the start of a daemon finds the
updates that the jobs need, and checks their bytes. What a crash has left of others, such as a torn end, was never
acknowledged, and is not needed.

Only this leader writes to a segment, and only until a sync fails: then the segment is sealed, and all that is in it and
not durable must be sent again. The bytes stay until a stored change has ended the assignments of all records
(`release`); then the segment is emptied, for other updates of any job, or removed. A leader that was suspended has
files of its own, and nothing of the next one's.

`store` and `close` run on the event loop; all other methods block, and threads call them, several at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import struct
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from fedplat import durable
from fedplat.model.file import FilePart
from fedplat.rounds import AssignmentId
from fedplat.wire import digests
from fedplat_server import crash_points, logs
from fedplat_server.errors import BlobError, ServerError, UploadError
from fedplat_server.storage import files
from fedplat_server.storage.spool_file import SpoolFile, name_attempt, name_update

MAX_BYTES = 2**20
"""Maximum size of an update that is a record."""
SEGMENT_BYTES = 64 * 2**20
"""The size after which the next updates get another segment: one stays as long as one of its records is needed."""
GAP_S = 0.005
"""The time for which updates wait for the next one, to be synced with it."""
GATHER_S = 0.05
"""The longest time for which an update waits for others, if some are still being received."""
MAX_SPARE = 4
"""Maximum number of empty segments that are kept for the next updates."""
PAGE_BYTES = 4096
FOLDER = "segments"
_ENDING = ".segment"
_MAGIC = b"fedplat record 1"
_CHECK_BYTES = 8
_HEADER = struct.Struct(f"<16s32s32s80sQQ{_CHECK_BYTES}s")
"""The magic, the hashes of the attempt and the assignment, the digest of the update (empty until it is reported), the
bytes that are reserved and those that the update has, and a checksum."""


class Record(NamedTuple):
    """A record as its header names it: the hashes of its attempt and assignment, its digest, and its bytes."""

    attempt: str
    update: str
    digest: str
    part: FilePart

    def is_intact(self) -> bool:
        """Return whether the bytes have the digest. Raises `OSError`."""
        kind = digests.kind_of(self.digest)
        if kind and not digests.has_blake3():
            return False
        found = digests.UpdateHash(kind)
        found.update(self.part.read())
        return found.digest == self.digest


class RecordFile(SpoolFile):
    """An update that is received into a record, from `start` of its segment, and is not durable yet."""

    def __init__(self, key: AssignmentId, name: str, segment: _Segment, reserved: tuple[int, int]) -> None:
        """`reserved` is where the record begins, and the declared size of the update."""
        super().__init__(segment.path, name)
        self.segment = segment
        self._key = key
        self._header_at, self._size_bytes = reserved

    @property
    def part(self) -> FilePart:
        """The bytes received."""
        return FilePart(self.path, self._header_at + _HEADER.size, self.received)

    @override
    def load(self) -> None:
        """Measure what `norm` lacks. No earlier process has written to the segment."""
        if self.norm is not None and self.norm.position < self.received:
            self.norm.update(self.part.read()[self.norm.position :])

    @override
    def open_writer(self) -> int:
        return os.dup(self.segment.descriptor)

    @override
    def append(self, descriptor: int, data: durable.Bytes) -> None:
        if self.gone:
            raise UploadError("the upload was discarded; resume at 0")
        durable.write_at(descriptor, data, self.part.start + self.received)
        self._hash.update(data)
        if self.norm is not None:
            self.norm.update(data)
        self.received += memoryview(data).nbytes

    @override
    def restart(self) -> None:
        self.received = 0
        self._hash = digests.UpdateHash(self._hash.kind)
        if self.norm is not None:
            self.norm.restart()

    @override
    def assign_digest(self, digest: str, path: Path) -> None:
        self.digest = digest

    @override
    def sync(self) -> None:
        raise AssertionError("a segment is synced for all reports that wait")

    @override
    def remove(self) -> None:
        self.segment.open.discard(self)

    def write_header(self, digest: str = "") -> None:
        """Write the header; the digest is that of the report. Raises `OSError`."""
        header = make_header(self._key, digest, self._size_bytes, self.received)
        durable.write_at(self.segment.descriptor, header, self._header_at)


class _Waiting(NamedTuple):
    """An update that waits for its sync."""

    key: AssignmentId
    file: RecordFile
    when_durable: Callable[[], None]
    done: asyncio.Future[None]


class _Segment:
    """A file of records. `live` are the assignments of which it has records that may be needed; `open` are received.

    `has_unknown`: it has updates that the database does not know. `is_busy`: it is being synced.
    """

    def __init__(self, path: Path, descriptor: int = -1) -> None:
        self.path = path
        self.descriptor = descriptor
        self.live: set[AssignmentId] = set()
        self.open: set[RecordFile] = set()
        self.has_unknown = False
        self.is_busy = False
        self._size_bytes = 0
        self._is_sealed = descriptor < 0

    @property
    def is_writable(self) -> bool:
        """Return whether more updates may be received."""
        return not self._is_sealed and self._size_bytes < SEGMENT_BYTES

    @property
    def is_idle(self) -> bool:
        """Return whether nothing in it is needed."""
        return not self.live and not self.open and not self.is_busy

    def reserve(self, key: AssignmentId, name: str, size_bytes: int) -> RecordFile:
        """Make a record for an update of a declared size. Raises `OSError`."""
        start = _next_page(self._size_bytes)
        file = RecordFile(key, name, self, (start, size_bytes))
        file.write_header()  # so that those behind it are found
        self._size_bytes = start + _HEADER.size + size_bytes
        self.open.add(file)
        return file

    def sync(self, updates: Iterable[RecordFile]) -> None:
        """Make complete updates durable. After a failure nothing here is, but for earlier updates. Raises `OSError`."""
        try:
            if self._is_sealed:
                raise OSError(errno.EIO, "an earlier sync of the segment failed")
            with crash_points.step("segment.header"):
                for each in updates:
                    each.write_header(each.digest)
            with crash_points.step("segment.sync"):
                os.fdatasync(self.descriptor)
        except BaseException:
            self._is_sealed = True
            for file in list(self.open):
                with file.lock:
                    file.gone = True
            self.open.clear()
            raise

    def empty(self) -> bool:
        """Remove all records; return whether others may be received. A fold that was cut off may still read it."""
        if self._is_sealed or not files.free(self.descriptor, _next_page(self._size_bytes)):
            return False
        self._size_bytes = 0
        return True

    def remove(self) -> None:
        """Delete the file, or set it aside if it has updates that the database does not know. Raises `OSError`."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor, self._is_sealed = -1, True
        if self.has_unknown:
            files.put_aside(self.path, self.path.parent)
        else:
            self.path.unlink(missing_ok=True)


class Segments:
    """The segments in a folder, which is created with the first of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stores_record: Callable[[AssignmentId, int], bool] = lambda key, size_bytes: False
        """Whether an update of a size may be a record. Not if other processes read it, by its path."""
        self._lock = threading.Lock()
        self._segments: dict[Path, _Segment] = {}
        self._current: dict[str, _Segment] = {}  # by job
        self._spare: list[_Segment] = []
        self._records: dict[AssignmentId, dict[str, FilePart]] = {}  # by digest
        self._waiting: dict[str, list[_Waiting]] = {}  # by job; on the event loop only
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, needed: Iterable[AssignmentId], known: Collection[str]) -> None:
        """Find the records of needed updates, and remove the segments that have none.

        Those with updates of attempts that are not `known` (`name_attempt`) are set aside. Only for the start.
        """
        keys = {name_update(key): key for key in needed}
        with files.translate_os_errors("reading the segments", "updates"), crash_points.step("segment.keep"):
            for path in list_segments(self.folder):
                self._keep(_Segment(path), keys, known)
            num_aside = sum(segment.has_unknown and segment.is_idle for segment in self._segments.values())
            self._remove_idle()
        if num_aside:
            files.warn_of_set_aside(self.folder / files.SET_ASIDE_FOLDER, num_aside)
        self.expire()

    def expire(self) -> None:
        """Remove the segments that were set aside long enough ago."""
        files.expire_set_aside(self.folder)

    def find(self, key: AssignmentId, digest: str) -> FilePart | None:
        """Return where the bytes of a durable update are; None if it is no record."""
        with self._lock:
            return self._records.get(key, {}).get(digest)

    def list_records(self) -> dict[AssignmentId, tuple[str, FilePart]]:
        """Return the digests and places of all records; of two of an assignment, the last one."""
        with self._lock:
            return {key: list(parts.items())[-1] for key, parts in self._records.items()}

    def open(self, key: AssignmentId, name: str, size_bytes: int) -> RecordFile | None:
        """Return the record for a new upload of a declared size; None if it needs a file. Raises `OSError`."""
        if not self.stores_record(key, size_bytes):
            return None
        job_id = key.attempt.job_id
        with self._lock:
            segment = self._current.get(job_id)
            if segment is None or not segment.is_writable:
                segment = self._spare.pop() if self._spare else self._make()
                self._current[job_id] = segment
            return segment.reserve(key, name, size_bytes)

    async def store(self, key: AssignmentId, file: RecordFile, when_durable: Callable[[], None]) -> None:
        """Return when a complete update is durable, and `when_durable` was called in a thread.

        Raises `UploadError` if it was removed. After `BlobFullError` or `BlobError` it must be sent again.
        """
        job_id = key.attempt.job_id
        waiting = _Waiting(key, file, when_durable, asyncio.get_running_loop().create_future())
        if job_id in self._waiting:
            self._waiting[job_id].append(waiting)
        else:
            self._waiting[job_id] = [waiting]
            task = asyncio.create_task(self._store_waiting(job_id), name=f"store updates of {job_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await waiting.done

    def release(self, keys: Iterable[AssignmentId]) -> None:
        """Drop the records of assignments that have ended. Raises `BlobError`: the next start removes what is left."""
        with self._lock:
            for key in keys:
                for part in self._records.pop(key, {}).values():
                    self._segments[part.path].live.discard(key)
        with files.translate_os_errors("emptying a segment", "updates"):
            self._remove_idle()

    async def close(self) -> None:
        """Wait for the updates that are being stored, and remove the empty segments."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with self._lock:
            spare, self._spare = self._spare, []
        for segment in spare:
            with contextlib.suppress(OSError):
                segment.remove()

    async def _store_waiting(self, job_id: str) -> None:
        waiting, batch = self._waiting[job_id], list[_Waiting]()
        try:
            while waiting:
                await self._gather(waiting)
                batch = waiting[:]
                waiting.clear()
                refused = await asyncio.to_thread(self._sync, batch)
                for each in batch:
                    _answer(each, refused.get(each))
        finally:  # also if this task fails or is cancelled: no report waits forever
            del self._waiting[job_id]
            for each in (*batch, *waiting):
                _answer(each, BlobError("the update could not be stored"))

    async def _gather(self, waiting: Sequence[_Waiting]) -> None:
        """Wait a moment for the next update, and a few moments if others are being received."""
        clock = asyncio.get_running_loop().time
        ends_at, num_before = clock() + GATHER_S, 0
        while clock() < ends_at and (len(waiting) > num_before or self._num_open(waiting) > len(waiting)):
            num_before = len(waiting)
            await asyncio.sleep(GAP_S)

    def _num_open(self, waiting: Sequence[_Waiting]) -> int:
        return sum(len(segment.open) for segment in {each.file.segment for each in waiting})

    def _sync(self, batch: Sequence[_Waiting]) -> dict[_Waiting, ServerError]:
        """Make updates durable; return those that were removed meanwhile, or that are not durable, and why."""
        refused: dict[_Waiting, ServerError] = {}
        by_segment: dict[_Segment, list[_Waiting]] = {}
        for each in batch:
            with self._lock:  # so that no segment is removed meanwhile
                if each.file not in each.file.segment.open:
                    refused[each] = UploadError("the update is missing; resume at 0")
                else:
                    by_segment.setdefault(each.file.segment, []).append(each)
                    each.file.segment.is_busy = True
        for segment, updates in by_segment.items():
            error: BlobError | None = None
            try:
                with files.translate_os_errors("syncing updates", "updates"):
                    segment.sync([each.file for each in updates])
            except BlobError as exc:
                error = exc
            with self._lock:
                segment.is_busy = False
                for key, file, _, _ in updates if error is None else ():
                    self._records.setdefault(key, {})[file.digest] = file.part
                    segment.live.add(key)
            for each in updates:
                if error is None:
                    each.when_durable()
                else:
                    refused[each] = error
        return refused

    def _make(self) -> _Segment:
        durable.make_folder(self.folder)
        path = self.folder / f"{uuid.uuid4().hex}{_ENDING}"
        with crash_points.step("segment.make"):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                durable.sync(self.folder)
            except BaseException:
                os.close(descriptor)
                path.unlink()
                raise
        segment = self._segments[path] = _Segment(path, descriptor)
        return segment

    def _keep(self, segment: _Segment, needed: Mapping[str, AssignmentId], known: Collection[str]) -> None:
        for record in read_records(segment.path):
            key = needed.get(record.update)
            if key is None:
                segment.has_unknown |= record.attempt not in known
            elif record.is_intact():
                self._records.setdefault(key, {})[record.digest] = record.part
                segment.live.add(key)
            else:  # it was never acknowledged, or the disk has damaged it
                logs.get().warning("the record of an update is damaged", digest=record.digest, file=str(segment.path))
        self._segments[segment.path] = segment

    def _remove_idle(self) -> None:
        """Empty or remove the segments without live records. Raises `OSError`."""
        with self._lock:
            for segment in list(self._segments.values()):
                if not segment.is_idle or segment in self._spare:
                    continue
                self._current = {job: each for job, each in self._current.items() if each is not segment}
                with crash_points.step("segment.release"):
                    if len(self._spare) < MAX_SPARE and segment.empty():
                        self._spare.append(segment)
                    else:
                        del self._segments[segment.path]
                        segment.remove()


def make_header(key: AssignmentId, digest: str, reserved_bytes: int, size_bytes: int) -> bytes:
    """Return the header of a record."""
    names = [bytes.fromhex(each) for each in (name_attempt(key.attempt), name_update(key))]
    packed = _HEADER.pack(_MAGIC, *names, digest.encode(), reserved_bytes, size_bytes, b"")
    return _sign(packed[:-_CHECK_BYTES])


def read_records(path: Path) -> Iterator[Record]:
    """Yield the reported records of a segment up to a torn end. Their bytes may be damaged. Raises `OSError`."""
    with path.open("rb") as file:
        start = 0
        while len(header := os.pread(file.fileno(), _HEADER.size, start)) == _HEADER.size:
            magic, attempt, update, digest, reserved_bytes, size_bytes, _ = _HEADER.unpack(header)
            if magic != _MAGIC or header != _sign(header[:-_CHECK_BYTES]):
                return
            start += _HEADER.size
            if digest := digest.rstrip(b"\0").decode():
                yield Record(attempt.hex(), update.hex(), digest, FilePart(path, start, size_bytes))
            start = _next_page(start + reserved_bytes)


def list_segments(folder: Path) -> list[Path]:
    """Return the segments of a folder, sorted; none if there is no folder."""
    return sorted(folder.glob(f"*{_ENDING}"))


def _sign(header: bytes) -> bytes:
    return header + hashlib.sha256(header).digest()[:_CHECK_BYTES]


def _next_page(position: int) -> int:
    return -(-position // PAGE_BYTES) * PAGE_BYTES


def _answer(waiting: _Waiting, error: ServerError | None) -> None:
    if waiting.done.done():  # its caller is gone, or it has been answered
        return
    if error is None:
        waiting.done.set_result(None)
    else:
        waiting.done.set_exception(type(error)(str(error)))
