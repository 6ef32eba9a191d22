"""Updates of middle size in files that many share, so that one sync makes all updates that wait durable.

A segment is a file of records, each a header and the bytes of an update. The reports of a job that arrive together are
appended to one segment and synced once, before they are accepted. A record begins on a page of its own: no later write
touches a page of an acknowledged one. Its header has the names of its attempt and its assignment, and its digest; so
the start of a daemon finds the updates that the jobs need, and checks their bytes. What a crash has left of others,
such as a torn end, was never acknowledged, and is not needed.

Only this leader writes to a segment, and only until a write cannot be undone or a sync fails: then the segment is
sealed. The bytes stay until a stored change has ended the assignments of all records (`release`); then the segment is
emptied, for other updates of any job, or removed. A leader that was suspended has files of its own, and nothing of the
next one's.

`store` and `close` run on the event loop; all other methods block, and threads call them, several at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import struct
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedplat import durable
from fedplat.rounds import AssignmentId
from fedplat_server import crash_points, logs
from fedplat_server.errors import BlobError, ServerError, UploadError
from fedplat_server.storage import files
from fedplat_server.storage.spool_file import CAN_KEEP_IN_MEMORY, HeldFile, name_attempt, name_update

MAX_BYTES = 2**20
"""Maximum size of an update that is a record."""
SEGMENT_BYTES = 64 * 2**20
"""The size after which the next updates get another segment: one stays as long as one of its records is needed."""
MAX_HELD_BYTES = 32 * 2**20
"""Maximum memory of the updates that are received and not stored yet. Others get files."""
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
_HEADER = struct.Struct(f"<16s32s32s32sQ{_CHECK_BYTES}s")
"""The magic, the hashes of the attempt and the assignment, the digest and the size of the update, and a checksum."""


class FilePart(NamedTuple):
    """Bytes of a file; those of an update in a segment."""

    path: Path
    start: int
    size_bytes: int

    def read(self) -> bytes:
        """Read the bytes. Raises `OSError`."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, self.size_bytes, self.start)
        finally:
            os.close(descriptor)


class Record(NamedTuple):
    """A record as its header names it: the hashes of its attempt and assignment, its digest, and its bytes."""

    attempt: str
    update: str
    digest: str
    part: FilePart

    def is_intact(self) -> bool:
        """Return whether the bytes have the digest. Raises `OSError`."""
        return hashlib.sha256(self.part.read()).hexdigest() == self.digest


class _Waiting(NamedTuple):
    """An update that waits for its sync."""

    key: AssignmentId
    file: HeldFile
    when_durable: Callable[[], None]
    done: asyncio.Future[None]


class _Segment:
    """A file of records. `live` are the assignments of which it has records that may be needed.

    `is_busy`: a job appends to it. `has_unknown`: it has updates that the database does not know.
    """

    def __init__(self, path: Path, descriptor: int = -1) -> None:
        self.path = path
        self.live: set[AssignmentId] = set()
        self.is_busy = False
        self.has_unknown = False
        self._descriptor = descriptor
        self._size_bytes = 0
        self._is_sealed = descriptor < 0

    @property
    def is_writable(self) -> bool:
        """Return whether more records may be appended."""
        return not self._is_sealed and self._size_bytes < SEGMENT_BYTES

    def append(
        self, updates: Iterable[tuple[AssignmentId, str, memoryview]]
    ) -> list[tuple[AssignmentId, str, FilePart]]:
        """Append updates with their digests, and sync them; return where each is. Raises `OSError`: none is there."""
        end, records = self._size_bytes, list[tuple[AssignmentId, str, FilePart]]()
        self._is_sealed = True  # until all has succeeded: after a failed sync nothing here can be trusted
        try:
            with crash_points.step("segment.append"):
                for key, digest, content in updates:
                    start = _next_page(end)
                    os.lseek(self._descriptor, start, os.SEEK_SET)
                    durable.write_all(self._descriptor, make_header(key, digest, len(content)))
                    durable.write_all(self._descriptor, content)
                    part = FilePart(self.path, start + _HEADER.size, len(content))
                    records.append((key, digest, part))
                    end = part.start + part.size_bytes
        except BaseException:
            os.ftruncate(self._descriptor, self._size_bytes)
            self._is_sealed = False
            raise
        with crash_points.step("segment.sync"):
            os.fdatasync(self._descriptor)
        self._is_sealed, self._size_bytes = False, end
        return records

    def empty(self) -> bool:
        """Remove all records; return whether others may be appended. Raises `OSError`."""
        if self._is_sealed:
            return False
        os.ftruncate(self._descriptor, 0)
        self._size_bytes = 0
        return True

    def remove(self) -> None:
        """Delete the file, or set it aside if it has updates that the database does not know. Raises `OSError`."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._is_sealed = -1, True
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
        self._held: set[HeldFile] = set()
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
            num_aside = sum(segment.has_unknown and not segment.live for segment in self._segments.values())
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

    def hold(self, key: AssignmentId, name: str, size_bytes: int) -> HeldFile | None:
        """Return the memory for an update of a declared size that becomes a record; None if it needs a file."""
        if not (CAN_KEEP_IN_MEMORY and self.stores_record(key, size_bytes)):
            return None
        with self._lock:
            self._held = {file for file in self._held if not file.gone}
            held_bytes = sum(file.size_bytes for file in self._held)
            if held_bytes + size_bytes > MAX_HELD_BYTES:
                return None
            file = HeldFile(name, size_bytes)
            self._held.add(file)
            return file

    async def store(self, key: AssignmentId, file: HeldFile, when_durable: Callable[[], None] = lambda: None) -> None:
        """Append a complete update, and return when it is durable and `when_durable` was called, in a thread.

        Raises `UploadError` if it was removed, and `BlobFullError` or `BlobError` if it cannot be stored.
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
                batch = _take_batch(waiting)
                try:
                    refused = await asyncio.to_thread(self._write, job_id, batch)
                except BlobError as exc:
                    refused = dict[_Waiting, ServerError].fromkeys(batch, exc)
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
        while clock() < ends_at and (len(waiting) > num_before or self._num_held() > len(waiting)):
            num_before = len(waiting)
            await asyncio.sleep(GAP_S)

    def _num_held(self) -> int:
        with self._lock:
            return sum(not file.gone for file in self._held)

    def _write(self, job_id: str, batch: Sequence[_Waiting]) -> dict[_Waiting, ServerError]:
        """Make updates durable, and return those that were removed meanwhile. Raises `BlobError`."""
        refused: dict[_Waiting, ServerError] = {}

        def read() -> Iterator[tuple[AssignmentId, str, memoryview]]:
            for each in batch:
                try:
                    yield each.key, each.file.digest, each.file.map()
                except UploadError as exc:
                    refused[each] = exc

        with files.translate_os_errors("storing updates", "updates"):
            segment = self._take_segment(job_id)
            try:
                records = segment.append(read())
                with self._lock:
                    for key, digest, part in records:
                        self._records.setdefault(key, {})[digest] = part
                        segment.live.add(key)
            finally:
                with self._lock:
                    segment.is_busy = False
        for each in batch:
            if each not in refused:
                each.when_durable()
        return refused

    def _take_segment(self, job_id: str) -> _Segment:
        """Return the segment to which a job's updates are appended now, which is busy. Raises `OSError`."""
        with self._lock:
            segment = self._current.get(job_id)
            if segment is None or not segment.is_writable:
                segment = self._spare.pop() if self._spare else None
            if segment is not None:
                segment.is_busy = True
                self._current[job_id] = segment
                return segment
        segment = self._make()
        segment.is_busy = True
        with self._lock:
            self._segments[segment.path] = self._current[job_id] = segment
        return segment

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
        return _Segment(path, descriptor)

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
                if segment.live or segment.is_busy or segment in self._spare:
                    continue
                self._current = {job: each for job, each in self._current.items() if each is not segment}
                with crash_points.step("segment.release"):
                    if len(self._spare) < MAX_SPARE and segment.empty():
                        self._spare.append(segment)
                    else:
                        del self._segments[segment.path]
                        segment.remove()


def make_header(key: AssignmentId, digest: str, size_bytes: int) -> bytes:
    """Return the header of a record."""
    names = [bytes.fromhex(each) for each in (name_attempt(key.attempt), name_update(key), digest)]
    return _sign(_HEADER.pack(_MAGIC, *names, size_bytes, b"")[:-_CHECK_BYTES])


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a segment up to a torn end. Their bytes may be damaged. Raises `OSError`."""
    with path.open("rb") as file:
        start, end = 0, os.fstat(file.fileno()).st_size
        while len(header := os.pread(file.fileno(), _HEADER.size, start)) == _HEADER.size:
            magic, attempt, update, digest, size_bytes, _ = _HEADER.unpack(header)
            part = FilePart(path, start + _HEADER.size, size_bytes)
            if magic != _MAGIC or header != _sign(header[:-_CHECK_BYTES]) or part.start + size_bytes > end:
                return
            yield Record(attempt.hex(), update.hex(), digest.hex(), part)
            start = _next_page(part.start + size_bytes)


def list_segments(folder: Path) -> list[Path]:
    """Return the segments of a folder, sorted; none if there is no folder."""
    return sorted(folder.glob(f"*{_ENDING}"))


def _sign(header: bytes) -> bytes:
    return header + hashlib.sha256(header).digest()[:_CHECK_BYTES]


def _next_page(position: int) -> int:
    return -(-position // PAGE_BYTES) * PAGE_BYTES


def _take_batch(waiting: list[_Waiting]) -> list[_Waiting]:
    """Remove the first updates that wait, of the size of one segment at most, and return them."""
    num, total = 0, 0
    while num < len(waiting) and (total := total + waiting[num].file.received) <= SEGMENT_BYTES:
        num += 1
    batch = waiting[:num]
    del waiting[:num]
    return batch


def _answer(waiting: _Waiting, error: ServerError | None) -> None:
    if waiting.done.done():  # its caller is gone, or it has been answered
        return
    if error is None:
        waiting.done.set_result(None)
    else:
        waiting.done.set_exception(type(error)(str(error)))
