"""What makes the updates of the spool durable: the folder itself, or an object store that outlives the host.

`Spool` receives every update into a file. Before a report is accepted, the backend makes that file durable. A leader on
another host finds the copies of an object store with `keep`, and gets those that it needs.

**Objects and leaders.** A leader that was suspended or cut off may go on for a while beside the next one, which may
need what the old one does not know of. So names begin with the leader's term (`fedplat_server.records.lease`), and a
leader removes objects for two reasons only. Both are safe at any time, however late the request arrives:

- A stored change has ended the assignment. The database stores the changes of the present leader only, and an
  assignment that has ended never opens again.
- At its start (`keep`) it finds objects that no assignment needs, of its own term or an earlier one. Objects of a later
  term belong to another leader; all others existed before this leader read its assignments, or were never acknowledged.

Nothing else removes an object: not a write that failed (the store may have written it, for a report that the next
leader has accepted), and not an upload that begins again.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from typing_extensions import override

from fedplat import durable
from fedplat.rounds import AssignmentId, AttemptKey
from fedplat_server import crash_points, logs
from fedplat_server.errors import BlobError, BlobFullError, BlobUnavailableError, SpoolError
from fedplat_server.storage import files, ownership, spool_file
from fedplat_server.storage.object_store import PART_BYTES, ObjectStore, RequestLimits, StoreHealth
from fedplat_server.storage.ownership import Contents, Owner

THREADS = 32
"""Reports that wait for the store at the same time. They have their own threads: a slow store must not stop others."""
REQUEST_LIMITS = RequestLimits(connect_s=3.0, request_s=20.0, retry_s=5.0, max_retries=4)
"""Short, because the client repeats its report, and a thread waits meanwhile."""
TRANSFER_BYTES = 4 * PART_BYTES
MEMORY_BYTES = 4 * TRANSFER_BYTES
"""The memory of all transfers at the same time. A large one holds a few parts, and a small one all of its bytes."""
DELETE_BATCH = 1000
MAX_DELETIONS = 100_000
"""Deletions that wait for a store that refuses them. The next start finds the objects of the others."""
FOLDER = "spool"
ASIDE = f"{files.SET_ASIDE_FOLDER}/{FOLDER}"
_NAME = re.compile(FOLDER + r"/term-([0-9]{1,18})/([0-9a-f]{64})/([0-9a-f]{64})-((?:b3:)?[0-9a-f]{64})")


class SpoolBackend(Protocol):
    """Makes received updates durable. Methods block and may be called from several threads."""

    @property
    def threads(self) -> ThreadPoolExecutor | None:
        """The threads for work that may wait for this backend; None: any."""
        ...

    @property
    def takes_rows(self) -> bool:
        """Return whether small updates may be rows of the database instead."""
        ...

    def claim(self, database: Owner, known: frozenset[str]) -> None:
        """Make a database, which knows these attempts by name, the owner of this place.

        Raises `ConfigError` if it belongs to another one, or has no owner and most attempts are unknown.
        """

    def keep(self, needed: Sequence[AssignmentId], known: Collection[str]) -> Sequence[tuple[AssignmentId, str]]:
        """Remove the other copies of `known` attempts, and set unknown ones aside; return those left, with digests."""
        ...

    def expire(self) -> None:
        """Remove the copies that were set aside long enough ago."""

    def make_durable(self, key: AssignmentId, digest: str, path: Path) -> None:
        """Make a synced file durable. Raises `BlobError`, of which `SpoolError` ends the attempt."""

    def has_copy(self, key: AssignmentId, digest: str) -> bool:
        """Return whether `keep` has found a copy of an update, which `fetch` can get."""
        ...

    def fetch(self, key: AssignmentId, digest: str, path: Path) -> None:
        """Write the copy of an update into a new file. The caller checks the digest. Raises `BlobError`."""

    def delete(self, keys: Iterable[AssignmentId]) -> None:
        """Remove the copies of updates whose assignments have ended. Never raises: what is left is removed later."""

    def forget(self, attempt: AttemptKey) -> None:
        """Drop what is known of an attempt that has ended."""

    def close(self) -> None:
        """Start no more work."""


class FolderBackend(SpoolBackend):
    """The folder of the spool: a synced file is durable once the folder of its attempt is synced.

    `place` is the folder with the file of its owner; None: a data folder, which needs none.
    """

    def __init__(self, place: Path | None = None) -> None:
        self._place = place
        self._untrusted: set[AttemptKey] = set()

    @property
    @override
    def threads(self) -> ThreadPoolExecutor | None:
        return None

    @property
    @override
    def takes_rows(self) -> bool:
        return True

    @override
    def claim(self, database: Owner, known: frozenset[str]) -> None:
        if (place := self._place) is not None:
            ownership.claim_folder(
                place, database, "updates", lambda: Contents.of(files.find_digests(place, "uploads/*"), known)
            )

    @override
    def keep(self, needed: Sequence[AssignmentId], known: Collection[str]) -> Sequence[tuple[AssignmentId, str]]:
        return []

    @override
    def expire(self) -> None:
        return

    @override
    def make_durable(self, key: AssignmentId, digest: str, path: Path) -> None:
        if key.attempt in self._untrusted:
            raise SpoolError("an earlier sync of the attempt's folder failed")
        try:
            with (
                files.translate_os_errors("syncing the attempt's folder", "updates"),
                crash_points.step("spool.folder_sync"),
            ):
                durable.sync(path.parent)
        except BlobError as exc:
            self._untrusted.add(key.attempt)
            raise SpoolError(str(exc)) from exc

    @override
    def has_copy(self, key: AssignmentId, digest: str) -> bool:
        return False

    @override
    def fetch(self, key: AssignmentId, digest: str, path: Path) -> None:
        raise BlobError("a folder has no copies")

    @override
    def delete(self, keys: Iterable[AssignmentId]) -> None:
        return

    @override
    def forget(self, attempt: AttemptKey) -> None:
        self._untrusted.discard(attempt)

    @override
    def close(self) -> None:
        return


class ObjectName(NamedTuple):
    """The parts of an object's name: the term of its leader, the hashes of its assignment, the digest of its bytes."""

    term: int
    attempt: str
    update: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> ObjectName | None:
        """Return the parts of a name; None if no spool has written it."""
        found = _NAME.fullmatch(text)
        return cls(int(found[1]), *found.groups()[1:]) if found is not None else None

    @classmethod
    def of(cls, term: int, key: AssignmentId, digest: str) -> ObjectName:
        """Return the name of an update that the leader of this term has received."""
        return cls(term, spool_file.name_attempt(key.attempt), spool_file.name_update(key), digest)

    @override
    def __str__(self) -> str:
        return f"{FOLDER}/term-{self.term}/{self.attempt}/{self.update}-{self.digest}"


class _MemoryBudget:
    """Memory that threads share; each waits until there is enough for it."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._used_bytes = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def share(self, size_bytes: int) -> Generator[None]:
        """Hold the memory for the transfer of this many bytes."""
        share = min(size_bytes, TRANSFER_BYTES, self._total_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._used_bytes + share <= self._total_bytes)
            self._used_bytes += share
        try:
            yield
        finally:
            with self._changed:
                self._used_bytes -= share
                self._changed.notify_all()


class ObjectBackend(SpoolBackend):
    """Copies of updates in an object store, written by the leader of one term."""

    def __init__(self, store: ObjectStore, term: int, health: StoreHealth, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._term = term
        self._health = health
        self._threads = ThreadPoolExecutor(THREADS, "spool")
        self._memory = _MemoryBudget(MEMORY_BYTES)
        self._lock = threading.Lock()  # for the fields below; never held while the store works
        self._names: dict[AssignmentId, set[ObjectName]] = {}  # all that may exist
        self._found: dict[tuple[AssignmentId, str], ObjectName] = {}
        self._deletions: deque[ObjectName] = deque(maxlen=MAX_DELETIONS)
        self._deleting = threading.Lock()

    @property
    @override
    def threads(self) -> ThreadPoolExecutor:
        return self._threads

    @property
    @override
    def takes_rows(self) -> bool:
        return False  # a copy is found on any host, also by a daemon of a release that does not know the rows

    @override
    def claim(self, database: Owner, known: frozenset[str]) -> None:
        ownership.claim_store(
            self._store,
            database,
            lambda: Contents.of(frozenset(name.attempt for name in list_names(self._store)), known),
        )

    @override
    def expire(self) -> None:
        self._store.expire(ASIDE, files.SET_ASIDE_KEEP_S)

    @override
    def keep(self, needed: Sequence[AssignmentId], known: Collection[str]) -> Sequence[tuple[AssignmentId, str]]:
        """Find the copies of needed updates, and remove or set aside the others that this leader may remove."""
        keys = {(spool_file.name_attempt(key.attempt), spool_file.name_update(key)): key for key in needed}
        needless: list[ObjectName] = []
        num_aside = 0
        with self._health.watch():
            for name in list_names(self._store):
                key = keys.get((name.attempt, name.update))
                if key is not None:
                    self._names.setdefault(key, set()).add(name)
                    self._found[key, name.digest] = name
                elif name.term <= self._term and name.attempt in known:
                    needless.append(name)
                elif name.term <= self._term:
                    self._store.copy(str(name), f"{files.SET_ASIDE_FOLDER}/{name}")
                    needless.append(name)
                    num_aside += 1
        if num_aside:
            files.warn_of_set_aside(f"{self._store.url}/{ASIDE}", num_aside)
        self._deletions.extend(needless)
        self._delete_pending()
        logs.get().info(
            "the spool was reconciled", copies=len(self._found), removed=len(needless), store=self._store.url
        )
        return list(self._found)

    @override
    def make_durable(self, key: AssignmentId, digest: str, path: Path) -> None:
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError as exc:  # this says nothing about the store
            raise BlobError("the update was deleted") from exc
        name = ObjectName.of(self._term, key, digest)
        self._note(key, name)  # before, because a write that fails may have written
        try:
            with self._memory.share(size_bytes), self._health.watch(), crash_points.step("spool_store.put"):
                self._store.put_file(str(name), path)
        except (BlobFullError, BlobUnavailableError):
            raise
        except BlobError as exc:  # such as a refused key: an operator corrects it, and the client tries until then
            raise BlobUnavailableError(str(exc)) from exc
        finally:
            self._note(key, name)  # again, because the assignment may have ended meanwhile

    @override
    def has_copy(self, key: AssignmentId, digest: str) -> bool:
        return (key, digest) in self._found

    @override
    def fetch(self, key: AssignmentId, digest: str, path: Path) -> None:
        name = self._found.get((key, digest))
        if name is None:
            raise BlobError("the update was deleted")
        with (
            self._memory.share(TRANSFER_BYTES),  # its size is not known yet
            self._health.watch(),
            crash_points.step("spool_store.fetch"),
        ):
            self._store.get_file(str(name), path, self._max_bytes)

    @override
    def delete(self, keys: Iterable[AssignmentId]) -> None:
        with self._lock:
            for key in keys:
                for name in self._names.pop(key, ()):
                    self._found.pop((key, name.digest), None)
                    self._deletions.append(name)
        self._delete_pending()

    @override
    def forget(self, attempt: AttemptKey) -> None:
        return

    @override
    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note(self, key: AssignmentId, name: ObjectName) -> None:
        with self._lock:
            self._names.setdefault(key, set()).add(name)

    def _delete_pending(self) -> None:
        """Remove the objects that wait for it, unless another thread does so already."""
        while self._deletions and self._deleting.acquire(blocking=False):
            try:
                while batch := self._take_batch():
                    self._delete_batch(batch)
            except BlobError as exc:  # harmless for the round; the next deletion or the next start repeats it
                logs.get().error("copies of updates could not be deleted", updates=len(self._deletions), error=str(exc))
                return
            finally:
                self._deleting.release()

    def _take_batch(self) -> Sequence[ObjectName]:
        with self._lock:
            return [self._deletions.popleft() for _ in range(min(DELETE_BATCH, len(self._deletions)))]

    def _delete_batch(self, batch: Collection[ObjectName]) -> None:
        try:
            with self._health.watch(), crash_points.step("spool_store.delete"):
                self._store.delete([str(name) for name in batch])
        except BlobError:
            with self._lock:
                self._deletions.extend(batch)
            raise


def open_backend(url: str, term: int, health: StoreHealth, max_bytes: int) -> ObjectBackend:
    """Return the backend of the leader of a term; no update has more than `max_bytes`. Raises `ConfigError`."""
    return ObjectBackend(ObjectStore(url, REQUEST_LIMITS), term, health, max_bytes)


def list_names(store: ObjectStore) -> Iterable[ObjectName]:
    """Yield the names of the updates in a store. Other objects are not the spool's. Raises `BlobError`."""
    return (name for stored in store.list(FOLDER) if (name := ObjectName.parse(stored.name)) is not None)
