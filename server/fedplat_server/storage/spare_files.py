"""Spare files: those of merged updates, in whose room the next updates of the same job are received.

A new file costs the kernel new pages of its cache and new blocks of the disk. Overwriting a file costs a fraction of
that (`docs/performance.md`, "Transfer"). So the file of a large update that is not needed any more is moved to `spare`
in the folder of the spool, and the next upload of the job takes it.

**What may be reused.** A file that this process has made, that was durable, and of a job whose updates may stay on the
disk for a while (`SpareFiles.takes`): not of one with `[privacy]`, secure aggregation or `durability = "memory"`. Only
updates of the same job get it, and only if no other descriptor or mapping of it is left in any process of this host: a
fold that was cut off may still read it. The kernel tells, by granting a write lease. A file system without leases has
no spare files.

**What is behind the bytes received** is of an earlier update. The number of bytes received is known to this process
(`SpoolFile.received`), and until the file is complete its name ends with a mark: `<assignment>-<name>.<bytes>`. The
mark is moved now and then, by a rename, never beyond what was written. No reader knows such a name. When the last byte
has arrived, the file is cut to its size, and then gets its plain name, under which it is read, synced and acknowledged.
A start cuts what it finds to its mark (`restore`). After a power failure the mark may be ahead of the data: then the
bytes have another digest, and the upload begins again, as with a file that was not reused. Older releases do not know
marked names, and remove them.

**How much.** A new large file of a job is only made if there is no spare one, so both together are never more than were
needed at once. They are only kept while as much of the disk is free; they are removed when the job has ended or has had
no open attempt for a minute, when the disk is full, at the end of the daemon, and by the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from typing_extensions import override

from fedplat import durable
from fedplat.rounds import AssignmentId, JobState
from fedplat.rounds.states import ENDED_JOBS
from fedplat_server import crash_points, instruments
from fedplat_server.storage import files
from fedplat_server.storage.spool_file import SpoolFile

FOLDER = "spare"
IDLE_S = 60.0
"""The time for which a job without an open attempt keeps its spare files."""
MIN_FREE = 0.1
"""The part of the disk that is free while there are spare files."""
_MARKED = re.compile(r"(.+)\.([0-9]{1,18})")
_IN_USE = frozenset({errno.EAGAIN, errno.EACCES})


class _Spare(NamedTuple):
    path: Path
    size_bytes: int


class SpareFiles:
    """The spare files of all jobs. Thread-safe; holds no other lock while it works."""

    def __init__(self, folder: Path) -> None:
        """`folder` is that of the spool."""
        self.folder = folder / FOLDER
        self.takes: Callable[[AssignmentId, int], bool] = lambda key, size_bytes: False
        """Whether the file of an update of a size may be reused; False once its job has ended."""
        self._lock = threading.Lock()
        self._spare: dict[str, list[_Spare]] = {}  # by job
        self._can_lease = hasattr(fcntl, "F_SETLEASE")
        instruments.add_spare_room(self)

    @property
    def size_bytes(self) -> int:
        """The size of all spare files."""
        with self._lock:
            return self._count_bytes()

    def make(self, key: AssignmentId, path: Path, name: str, size_bytes: int) -> SpoolFile:
        """Return the file of a new update, in the room of a spare one of its job if there is any."""
        if not (self._can_lease and self.takes(key, size_bytes)):
            return SpoolFile(path, name)
        file = self._reuse(key.attempt.job_id, path, name) or SpoolFile(path, name)
        file.reusable = True
        return file

    def put(self, key: AssignmentId, file: SpoolFile) -> bool:
        """Keep the file of an update that is not needed any more; return False if it is to be removed."""
        if not (file.reusable and file.durable and self._can_lease and self.takes(key, file.received)):
            return False
        spare = _Spare(self.folder / uuid.uuid4().hex, file.received)
        with self._lock, contextlib.suppress(OSError):
            if self._has_room(spare.size_bytes):
                with crash_points.step("spare.put"):
                    self.folder.mkdir(exist_ok=True)
                    file.path.rename(spare.path)
                self._spare.setdefault(key.attempt.job_id, []).append(spare)
                return True
        return False

    def is_used(self, job_id: str) -> bool:
        """Return whether a job has spare files, or updates whose files may become spare."""
        return job_id in self._spare

    def free(self, job_id: str = "") -> bool:
        """Remove the spare files of a job, or all; return whether there were any."""
        with self._lock:
            jobs = [job_id] if job_id else list(self._spare)
            paths = [spare.path for job in jobs for spare in self._spare.pop(job, ())]
        if paths:
            with crash_points.step("spare.free"):
                for path in paths:
                    with contextlib.suppress(OSError):  # another leader has removed it
                        path.unlink()
                with contextlib.suppress(OSError):  # it has others, or does not exist
                    self.folder.rmdir()
        return bool(paths)

    def close(self) -> None:
        """Remove all spare files, and keep no more."""
        self._can_lease = False
        self.free()

    def clear(self) -> None:
        """Remove what an earlier process has left. For the start."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def _count_bytes(self) -> int:
        return sum(spare.size_bytes for each in self._spare.values() for spare in each)

    def _has_room(self, more_bytes: int) -> bool:
        disk = shutil.disk_usage(self.folder.parent)
        return disk.free >= max(MIN_FREE * disk.total, self._count_bytes() + more_bytes)

    def _reuse(self, job_id: str, path: Path, name: str) -> SpoolFile | None:
        while True:
            with self._lock:
                spare = self._spare.setdefault(job_id, [])
                taken = spare.pop() if spare else None  # the last one: its pages are most likely still in memory
            if taken is None:
                return None
            with contextlib.suppress(OSError):
                if self._is_unused(taken.path):
                    with crash_points.step("spare.take"):
                        taken.path.rename(_mark(path, 0))
                    return ReusedFile(path, name)
                taken.path.unlink()

    def _is_unused(self, path: Path) -> bool:
        """Return whether the file has no descriptor and no mapping but one here. Raises `OSError`."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # If a process opens it just now: this signal, which is ignored, instead of one that ends this process.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as exc:
            if exc.errno not in _IN_USE:  # the file system has no leases
                self._can_lease = False
            return False
        finally:
            os.close(descriptor)
        return True


class IdleWatch:
    """Removes the spare files of jobs that have ended, or have no open attempt for a while. On the event loop."""

    def __init__(self, spare: SpareFiles) -> None:
        self._spare = spare
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by job
        self._tasks: set[asyncio.Task[bool]] = set()

    def follow(self, job: JobState) -> None:
        """Follow a stored change of a job."""
        if (timer := self._timers.pop(job.job_id, None)) is not None:
            timer.cancel()
        if job.open_attempt is None and self._spare.is_used(job.job_id):
            delay_s = 0.0 if job.status in ENDED_JOBS else IDLE_S
            self._timers[job.job_id] = asyncio.get_running_loop().call_later(delay_s, self._free, job.job_id)

    async def close(self) -> None:
        """Remove all spare files."""
        for timer in self._timers.values():
            timer.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._spare.close)

    def _free(self, job_id: str) -> None:
        self._timers.pop(job_id, None)
        task = asyncio.create_task(asyncio.to_thread(self._spare.free, job_id), name="remove spare files")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ReusedFile(SpoolFile):
    """An update that is received into the file of an earlier one, which has a marked name until it is complete."""

    def __init__(self, path: Path, name: str) -> None:
        """`path` is that of the complete update."""
        super().__init__(path, name)
        self._plain = path
        self._marked = 0
        self._loaded = True
        self.path = _mark(path, 0)

    @override
    def append(self, descriptor: int, data: durable.Bytes) -> None:
        super().append(descriptor, data)
        if self.received >= self._marked + files.WRITEBACK_BYTES:
            self._move_mark()

    @override
    def restart(self) -> None:
        super().restart()
        self._move_mark()

    @override
    def pause(self) -> None:
        super().pause()
        self._move_mark()

    @override
    def settle(self) -> None:
        if self.path != self._plain:
            with crash_points.step("spare.cut"):
                os.truncate(self.path, self.received)
            with crash_points.step("spare.name"):
                self.path = self.path.rename(self._plain)

    @override
    def assign_digest(self, digest: str, path: Path) -> None:
        self.settle()
        super().assign_digest(digest, path)
        self._plain = path

    def _move_mark(self) -> None:
        """Set the mark to the bytes received. If that fails, it stays behind, and a start resumes there."""
        if self.path != self._plain and self.received != self._marked:
            with contextlib.suppress(OSError), crash_points.step("spare.mark"):
                self.path = self.path.rename(_mark(self._plain, self.received))
                self._marked = self.received


def restore(path: Path) -> Path:
    """Return the path of an unfinished update of an earlier process, without what is behind its mark."""
    if (found := _MARKED.fullmatch(path.name)) is None:
        return path
    if path.stat().st_size > int(found[2]):
        os.truncate(path, int(found[2]))
        durable.sync(path)  # before it gets the name of a file of which all bytes count
    return path.rename(path.with_name(found[1]))


def _mark(path: Path, received: int) -> Path:
    return path.with_name(f"{path.name}.{received}")
