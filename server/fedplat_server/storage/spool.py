"""The spool: every update that clients send, from its first byte until no attempt needs it any more.

The spool alone deletes updates. It learns from stored changes which ones are needed (`follow`): those of open
assignments, and those that the open attempt has accepted. All others it refuses, and deletes in the background; so a
file is deleted after the change that makes it needless is stored, and an upload that arrives later makes no new one.

An upload may be resumed: its file grows until its bytes have the promised digest. The files of jobs with `durability =
"spool"` lie in a folder for each attempt, and outlive the process: an update is on the disk for good (`persist`) before
its report is accepted. Those of jobs with `durability = "memory"` are in memory. `follow` and `close` belong to the
event loop; all else blocks, and asyncio calls it in threads, several at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from fedplat import durable
from fedplat.rounds import AssignmentId, AttemptKey, Change
from fedplat.rounds.reporting import needs_update
from fedplat_server import crash_points, logs
from fedplat_server.errors import BlobError, SpoolError, UploadError
from fedplat_server.storage import files
from fedplat_server.storage.spool_file import MemoryFile, OpenUpload, SpoolFile


class Spool:
    """The updates of all jobs, in a folder that is made if it is not there; those of some jobs are in memory."""

    def __init__(self, folder: Path, in_memory: Callable[[str], bool] = lambda _: False) -> None:
        self.folder = folder
        self._in_memory = in_memory
        self._lock = threading.Lock()  # taken before the lock of a file, never after
        self._needed: dict[AttemptKey, set[str]] = {}  # client ids; only the event loop changes it
        self._files: dict[AssignmentId, SpoolFile] = {}
        self._writers: dict[SpoolFile, OpenUpload] = {}
        self._untrusted: set[AttemptKey] = set()
        self._left: dict[str, list[Path]] = {}
        self._deletions: set[asyncio.Task[None]] = set()
        with files.translate_os_errors(f"making the folder {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    # --- which updates are needed ---

    def expect(self, needed: Iterable[AssignmentId]) -> None:
        """Accept uploads for these assignments from now on."""
        for each in needed:
            self._needed.setdefault(each.attempt, set()).add(each.client_id)

    def follow(self, changes: Iterable[Change]) -> None:
        """Expect the updates that stored changes make needed; delete those that they make needless."""
        needless: list[AssignmentId] = []
        for change in changes:
            attempt = change.attempt
            ended = attempt.assignments.values() if attempt is not None and not attempt.is_open else ()
            for each in (*change.assignments, *ended):
                if needs_update(change.job, each):
                    self.expect([each.id])
                elif self._forget(each.id):
                    needless.append(each.id)
        if needless:
            task = asyncio.create_task(self._delete_in_thread(needless), name="delete updates")
            self._deletions.add(task)
            task.add_done_callback(self._deletions.discard)

    def keep(self, needed: Sequence[AssignmentId]) -> None:
        """Delete all but these updates, and expect them: for the start, before anything is opened."""
        self.expect(needed)
        wanted: dict[Path, set[str]] = {}
        for each in needed:
            wanted.setdefault(self._folder(each.attempt), set()).add(_file_name(each))
        with self._lock, files.translate_os_errors("clearing the spool"), crash_points.step("spool.keep"):
            for path in self.folder.iterdir():
                if path in wanted:
                    self._keep_files(path, wanted[path])
                elif path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    async def close(self) -> None:
        """Wait for the deletions that are under way."""
        await asyncio.gather(*self._deletions, return_exceptions=True)

    # --- receiving ---

    def count_received(self, key: AssignmentId, digest: str) -> int:
        """Return how many of these bytes there are: where to resume."""
        file = self._find(key, digest)
        if file is None:
            return 0
        with file.lock, files.translate_os_errors("reading an upload"):
            file.load()
            return file.received

    def open(
        self, key: AssignmentId, digest: str, size_bytes: int, offset: int, limit_bytes: int | None = None
    ) -> OpenUpload:
        """Resume an upload, or start it. An upload of other bytes is thrown away; another writer is fenced.

        Raises `UploadError` if the assignment has ended, if the declared size is beyond the limit, if the offset is not
        where the upload stopped, or if other bytes were taken as complete before.
        """
        if not files.is_digest(digest):
            raise UploadError(f"{digest[:100]!r} is not a digest: expected 64 lowercase hexadecimal digits")
        if size_bytes < 0 or (limit_bytes is not None and size_bytes > limit_bytes):
            raise UploadError(f"{size_bytes} bytes were declared; at most {limit_bytes} are accepted")
        file = self._find(key, digest) or self._replace(key, digest)
        with file.lock, files.translate_os_errors("opening an upload"):
            if file.gone:
                raise UploadError("the upload was thrown away meanwhile; resume at 0")
            file.load()
            if (earlier := self._writers.get(file)) is not None:
                earlier.fence()
            if offset != file.received:
                raise UploadError(f"offset {offset} is not where the upload stopped; resume at {file.received}")
            writer = self._writers[file] = OpenUpload(file, size_bytes, self._writers)
            return writer

    def complete(self, key: AssignmentId, digest: str) -> Path | None:
        """Return the file if all bytes are there. From now on they stay as they are, until they are deleted."""
        file = self._find(key, digest)
        if file is None:
            return None
        with file.lock, files.translate_os_errors("reading an upload"):
            file.load()
            if file.gone or not file.is_complete():
                return None
            if (writer := self._writers.get(file)) is not None:
                writer.fence()
            file.sealed = True
            return file.path

    def persist(self, key: AssignmentId, digest: str) -> int:
        """Make a complete update outlive a power failure, and return its size. Costs nothing if it does already.

        A sync that failed is never tried again: the kernel may have dropped what it could not write, and would report
        success. The update is thrown away, to be sent again. Raises `UploadError` if it is not there, `BlobFullError`
        or `BlobError` if it cannot be written, and `SpoolError` if nothing in the attempt's folder can be trusted.
        """
        file = self._find(key, digest)
        if file is None:
            raise UploadError("the update is not there any more; resume at 0")
        try:
            with file.lock, files.translate_os_errors("syncing an update"):
                if file.gone:
                    raise UploadError("the update is not there any more; resume at 0")
                if not file.durable:
                    file.sync()
        except BlobError:
            self.discard(key)
            raise
        if not file.durable and not isinstance(file, MemoryFile):
            self._sync_folder(key.attempt)
        file.durable = True
        return file.received

    def discard(self, key: AssignmentId) -> None:
        """Delete an update that may be sent again, or that was folded and is in memory only."""
        with self._lock, files.translate_os_errors("deleting an update"), crash_points.step("upload.discard"):
            self._remove(key)

    # --- deleting ---

    def _forget(self, key: AssignmentId) -> bool:
        """Expect an update no longer; return whether it was expected."""
        clients = self._needed.get(key.attempt, set())
        if key.client_id not in clients:
            return False
        clients.remove(key.client_id)
        if not clients:
            del self._needed[key.attempt]
        return True

    async def _delete_in_thread(self, needless: Sequence[AssignmentId]) -> None:
        try:
            # Unlinking gigabytes must not hold up the event loop.
            await asyncio.to_thread(self._delete, needless)
        except BlobError as exc:  # no harm to the round; the next start clears the folder
            logs.get().error("updates could not be deleted", updates=len(needless), error=str(exc))

    def _delete(self, needless: Sequence[AssignmentId]) -> None:
        """Delete updates, and the folders of attempts of which no update is needed."""
        for key in needless:
            self.discard(key)
        for attempt in dict.fromkeys(key.attempt for key in needless):
            with self._lock, files.translate_os_errors("deleting the folder of an attempt"):
                if attempt not in self._needed:
                    self._remove_folder(attempt)

    def _remove(self, key: AssignmentId) -> None:
        for path in self._left.pop(_file_name(key), []):
            path.unlink(missing_ok=True)
        file = self._files.pop(key, None)
        if file is not None:
            with file.lock:
                if (writer := self._writers.get(file)) is not None:
                    writer.fence()
                file.remove()
                file.gone = True

    def _remove_folder(self, attempt: AttemptKey) -> None:
        folder = self._folder(attempt)
        self._untrusted.discard(attempt)
        if folder.exists():
            with crash_points.step("spool.discard"):
                shutil.rmtree(folder)

    def _keep_files(self, folder: Path, names: set[str]) -> None:
        for path in folder.iterdir():
            name = path.name.partition("-")[0]
            if name in names:
                self._left.setdefault(name, []).append(path)
            else:
                path.unlink()

    # --- files ---

    def _sync_folder(self, attempt: AttemptKey) -> None:
        if attempt in self._untrusted:
            raise SpoolError("the attempt's folder could not be synced before")
        try:
            with files.translate_os_errors("syncing the attempt's folder"), crash_points.step("spool.folder_sync"):
                durable.sync(self._folder(attempt))
        except BlobError as exc:
            self._untrusted.add(attempt)
            raise SpoolError(str(exc)) from exc

    def _folder(self, attempt: AttemptKey) -> Path:
        return self.folder / _hash(attempt)

    def _find(self, key: AssignmentId, digest: str) -> SpoolFile | None:
        with self._lock:
            file = self._files.get(key)
            if file is None and files.is_digest(digest) and (path := path_of(self.folder, key, digest)).exists():
                file = self._files[key] = SpoolFile(path, digest)
            return file if file is not None and file.digest == digest else None

    def _replace(self, key: AssignmentId, digest: str) -> SpoolFile:
        with self._lock, files.translate_os_errors("opening an upload"):
            if key.client_id not in self._needed.get(key.attempt, ()):
                raise UploadError("the assignment has ended")
            earlier = self._files.get(key)
            if earlier is not None and earlier.digest == digest:
                return earlier  # made by another call this very moment
            if earlier is not None and earlier.sealed:
                raise UploadError(f"the update {earlier.digest} was reported for this assignment already")
            self._remove(key)
            if self._in_memory(key.attempt.job_id):
                file = MemoryFile(digest)
            else:
                self._make_folder(self._folder(key.attempt))
                file = SpoolFile(path_of(self.folder, key, digest), digest)
            self._files[key] = file
            return file

    def _make_folder(self, folder: Path) -> None:
        if folder.exists():
            return
        with crash_points.step("spool.new_folder"):
            folder.mkdir()
            try:
                durable.sync(self.folder)
            except BaseException:
                folder.rmdir()
                raise


def path_of(folder: Path, key: AssignmentId, digest: str) -> Path:
    """Return where an update lies in the spool."""
    return folder / _hash(key.attempt) / f"{_file_name(key)}-{digest}"


def _file_name(key: AssignmentId) -> str:
    """Return what the name of the update's file begins with, whatever its digest."""
    return _hash((*key.attempt, key.client_id))


def _hash(names: tuple[object, ...]) -> str:
    # Ids come from outside: a hash is a file name whatever they hold.
    return hashlib.sha256("\n".join(map(str, names)).encode()).hexdigest()
