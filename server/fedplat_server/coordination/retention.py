"""The removal of data that jobs no longer keep, in the background of the leader, or by `fedplat-server prune`.

The database records that a file is removed before it is removed. A crash in between leaves an orphan, which the next
start removes. A file that several versions share is kept as long as one of them references it.

`find` returns what will be removed, `remove` removes it: rows first, then files. If a daemon is running, the daemon
removes the files, because other processes cannot detect files that it is writing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence

from fedplat.job.sections import Retention
from fedplat.rounds import AttemptKey, Change, JobState
from fedplat.rounds.privacy_rules import disclosure_of
from fedplat.rounds.states import ENDED_JOBS
from fedplat_server import errors, logs, retries
from fedplat_server.coordination.availability import KEEP_S
from fedplat_server.database.records import Removable, RetainedVersions
from fedplat_server.database.sql_audit import EVENTS_BATCH
from fedplat_server.database.sql_retention import BATCH
from fedplat_server.database.store import Store
from fedplat_server.records import audit
from fedplat_server.storage.blobs import BlobStore

CLOSE_S = 10.0
"""The time limit of `close` for the removal in progress."""
INTERVAL_S = 600.0
"""Interval of a full search, which also finds files that `fedplat-server prune` has marked as removed."""
MIN_AGE_S = 3600.0
"""Minimum age of a file that is removed only because no version references it."""
LAST_SEEN_INTERVAL_S = 6 * 3600.0
"""Interval in which the times of the last calls of clients with long sessions are stored."""
EVENT_AGE_S = 30 * 86_400.0
"""The age at which events are removed, unless a webhook still needs them."""
HISTORY_BATCH = 20
"""Number of attempts whose history is removed in one transaction."""


MIN_VERSIONS = 5
"""Number of newest versions that a job keeps if its file does not limit them and the disk is nearly full."""


def find_retained_versions(job: JobState, *, is_low: bool = False) -> RetainedVersions:
    """Return the versions of a job that keep their files.

    If the disk `is_low`, a job that has not ended and whose file does not limit versions keeps `MIN_VERSIONS` of them.
    """
    latest, options = job.latest.version, job.spec.retention
    num_versions = options.versions or (MIN_VERSIONS if is_low and job.status not in ENDED_JOBS else 0)
    # A private job's state may hold seeds of its noise: the states of all versions would reveal all seeds.
    private = latest + (job.status in ENDED_JOBS)
    states_from = latest + 1 - options.states if disclosure_of(job.spec).keeps_states else private
    models_from = latest + 1 - num_versions if num_versions else 0
    return RetainedVersions(models_from=max(models_from, 0), every=options.every, states_from=max(states_from, 0))


class RetentionTask:
    """The background task. `find_state` returns a job's state; None: it was deleted."""

    def __init__(
        self,
        blobs: BlobStore,
        store: Store,
        find_state: Callable[[str], JobState | None],
        drain_last_seen: Callable[[], Mapping[str, float]] = dict,
        set_asides: Sequence[Callable[[], None]] = (),
        is_low: Callable[[], bool] = lambda: False,
    ) -> None:
        """`drain_last_seen` returns the Unix times at which clients were seen since its last call.

        `set_asides` remove what was set aside long enough ago (`storage.set_aside`); they block. `is_low` returns
        whether the disk of the files is nearly full.
        """
        self._blobs = blobs
        self._store = store
        self._find_state = find_state
        self._drain_last_seen, self._is_low = drain_last_seen, is_low
        self._set_asides = set_asides
        self._jobs: dict[str, None] = {}
        self._options: dict[str, Retention] = {}
        self._leftovers: set[str] = set()
        self._limited_history: set[str] = set()
        self._scheduled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False

    def begin(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="retention")

    def on_stored(self, changes: Iterable[Change]) -> None:
        """Apply soon the policies of jobs that have a new version, another policy, or have ended."""
        for change in changes:
            job_id, options = change.job.job_id, change.job.spec.retention
            is_other = options is not self._options.get(job_id)
            if change.version is not None or change.job.status in ENDED_JOBS or is_other:
                self._options[job_id] = options
                self.schedule_job(job_id)

    def schedule_job(self, job_id: str) -> None:
        """Apply a job's policy soon."""
        self._jobs[job_id] = None
        self._scheduled.set()

    def schedule_blobs(self, digests: Sequence[str]) -> None:
        """Remove soon those files of an ended attempt that no version references."""
        self._leftovers.update(digests)
        self._scheduled.set()

    async def close(self) -> None:
        """Stop after the removal in progress. The next start of the daemon resumes the rest."""
        self._is_closing = True
        self._scheduled.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def apply(self, job_id: str) -> None:
        """Remove what a job does not keep, `BATCH` versions at a time; of a deleted job, all."""
        job = self._find_state(job_id)
        if job is None:
            return await self._remove_deleted(job_id)
        if job.spec.retention.history_days:
            self._limited_history.add(job_id)
        await self._remove_history(job)
        retained = find_retained_versions(job, is_low=self._is_low())
        while not self._is_closing and (found := await self._store.retention.list_removable(job_id, retained)):
            # Once the rows are stored, whatever the database answers, the versions are not found again.
            with self._blobs.sweep() as sweep, self._keeping(_digests({job_id: found})):
                unreferenced = await self._store.retention.mark_removed(job_id, found)
                size_bytes = await asyncio.to_thread(sweep.remove, unreferenced)
            models, states = sum(version.model for version in found), sum(version.state for version in found)
            logs.get().debug("old files were removed", job=job_id, models=models, states=states, bytes=size_bytes)
            if len(found) < BATCH:
                return

    async def _remove_deleted(self, job_id: str) -> None:
        self._limited_history.discard(job_id)
        while not self._is_closing:
            # What a crash leaves of these files, the next start sets aside.
            with self._blobs.sweep() as sweep:
                unreferenced = await self._store.deletion.remove_part(job_id)
                if unreferenced is None:
                    return
                with self._keeping(unreferenced):
                    await asyncio.to_thread(sweep.remove, unreferenced)

    async def _remove_history(self, job: JobState) -> None:
        days = job.spec.retention.history_days
        before = time.time() - days * 86400.0
        old = functools.partial(self._store.retention.list_old_attempts, job.job_id, before, HISTORY_BATCH)
        while days and not self._is_closing and (keys := await old()):
            # Assignments are kept: after a restart, selection restores the participations of clients from them.
            await self._store.retention.remove_history(keys, metrics=job.status in ENDED_JOBS)

    async def _remove_availability(self) -> None:
        await self._store.fleet.remove_availability(time.time() - KEEP_S)

    async def _note_seen(self) -> None:
        seen = sorted(self._drain_last_seen().items())
        for start in range(0, len(seen), BATCH):
            await self._store.clients.record_seen(dict(seen[start : start + BATCH]))

    async def remove_orphans(self) -> None:
        """Remove the files that `fedplat-server prune` marked as removed, and set those of no version aside."""
        with self._blobs.sweep() as sweep:
            existing = await asyncio.to_thread(self._blobs.all_digests)
            stored = await self._store.retention.list_digests()
            given_up, unknown = existing & stored.given_up, existing - stored.mentioned
            # Another daemon may have become the leader, and be about to reference a file that it has just written.
            await asyncio.to_thread(functools.partial(sweep.remove, given_up, older_than_s=MIN_AGE_S))
            await asyncio.to_thread(functools.partial(sweep.set_aside, unknown, older_than_s=MIN_AGE_S))

    async def _expire(self) -> None:
        for expire in self._set_asides:
            await asyncio.to_thread(expire)

    async def _remove_events(self) -> None:
        num_failed = await self._store.webhooks.limit_pending()
        if num_failed:
            logs.get().warning("webhooks are too far behind: their oldest deliveries failed", deliveries=num_failed)
        while (
            not self._is_closing and await self._store.events.remove_events(time.time() - EVENT_AGE_S) == EVENTS_BATCH
        ):
            pass

    async def _remove_leftovers(self) -> None:
        leftovers, self._leftovers = self._leftovers, set()
        with self._blobs.sweep() as sweep, self._keeping(leftovers):
            orphans = await self._store.retention.find_unreferenced(leftovers)
            await asyncio.to_thread(sweep.remove, orphans)

    @contextlib.contextmanager
    def _keeping(self, digests: Iterable[str]) -> Generator[None]:
        """Remember these files as leftovers if their removal fails."""
        try:
            yield
        except (errors.StoreError, errors.BlobError):
            self._leftovers.update(digests)
            raise

    async def _run(self) -> None:
        noted_at = asyncio.get_running_loop().time()
        while not self._is_closing:
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._scheduled.wait()
            except TimeoutError:
                await self._try(self.remove_orphans())
                await self._try(self._expire())
                await self._try(self._remove_events())
                await self._try(self._remove_availability())
                self._jobs |= dict.fromkeys(self._limited_history)  # history becomes old without an event
                if asyncio.get_running_loop().time() >= noted_at + LAST_SEEN_INTERVAL_S:
                    noted_at = asyncio.get_running_loop().time()
                    await self._try(self._note_seen())
            self._scheduled.clear()
            while self._jobs and not self._is_closing:
                job_id = next(iter(self._jobs))
                del self._jobs[job_id]  # first: it may be scheduled again meanwhile
                if not await self._try(self.apply(job_id)):
                    self._jobs[job_id] = None
            if self._leftovers and not self._is_closing:
                await self._try(self._remove_leftovers())

    async def _try(self, removal: Awaitable[None]) -> bool:
        """Await a removal, and log a failure of the database or the disk; return whether it need not be repeated."""
        try:
            await removal
        except errors.LeadershipLostError:
            raise
        except errors.BlobError as exc:  # a disk stays as it is for a while: not at once, but after `INTERVAL_S`
            logs.get().warning("old files could not be removed", error=str(exc))
        except errors.StoreError as exc:
            logs.get().warning("old files could not be removed", error=str(exc))
            self._scheduled.set()
            if not self._is_closing:
                await asyncio.sleep(retries.BACKGROUND_RETRY_S)
            return False
        return True


EVERYTHING = 1 << 31
Progress = Callable[[int, int], None]
"""A callback with the number of steps that are done, and of all steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class PruneLimits:
    """What to remove in addition to the policies of the jobs; None: nothing.

    `history_before` and `clients_before` are Unix times; `keep_versions` applies to jobs that have ended.
    """

    now_unix_s: float
    history_before: float | None = None
    keep_versions: int | None = None
    clients_before: float | None = None


@dataclasses.dataclass(frozen=True)
class PrunePlan:
    """What will be removed: versions by job, attempts with an old history, clients, and files without a reference."""

    versions: Mapping[str, list[Removable]]
    attempts: Mapping[str, list[AttemptKey]]
    ended: frozenset[str]
    clients: list[str]
    orphans: frozenset[str]
    size_bytes: int

    @property
    def counts(self) -> dict[str, int]:
        """The number of items of each kind."""
        removable = [version for versions in self.versions.values() for version in versions]
        return {
            "models": sum(version.model for version in removable),
            "states": sum(version.state for version in removable),
            "attempts": sum(map(len, self.attempts.values())),
            "clients": len(self.clients),
            "orphans": len(self.orphans),
            "bytes": self.size_bytes,
        }

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to remove."""
        return not any(self.counts.values())


async def find_obsolete(store: Store, blobs: BlobStore, limits: PruneLimits, *, with_orphans: bool) -> PrunePlan:
    """Return what will be removed. A file without a reference may be one that a daemon has just written."""
    versions, attempts, ended = dict[str, list[Removable]](), dict[str, list[AttemptKey]](), set[str]()
    for record in await store.jobs.load_jobs():
        job = record.state
        if job.status in ENDED_JOBS:
            ended.add(job.job_id)
        if removable := await store.retention.list_removable(job.job_id, _find_retained(job, limits), EVERYTHING):
            versions[job.job_id] = removable
        before = _history_before(job, limits)
        if before is not None and (old := await store.retention.list_old_attempts(job.job_id, before, EVERYTHING)):
            attempts[job.job_id] = old
    clients = [] if limits.clients_before is None else await store.clients.list_idle_clients(limits.clients_before)
    sizes = await asyncio.to_thread(blobs.list_sizes)
    orphans = sizes.keys() - await store.retention.list_referenced() if with_orphans else frozenset[str]()
    size_bytes = sum(sizes.get(digest, 0) for digest in {*orphans, *_digests(versions)})
    return PrunePlan(versions, attempts, frozenset(ended), clients, frozenset(orphans), size_bytes)


async def remove_obsolete(store: Store, limits: PruneLimits, plan: PrunePlan, progress: Progress) -> None:
    """Execute the plan in the database. `remove_files`, or a running daemon, removes the files."""
    steps = list(_steps(store, limits, plan))
    entry = audit.AuditEntry(audit.HOST, audit.AuditAction.PRUNED, "", plan.counts)
    await store.audit.append([entry])  # first: if this process dies, the next call removes what was recorded
    for done, step in enumerate(steps):
        progress(done, len(steps))
        await step()
    progress(len(steps), len(steps))


async def remove_obsolete_files(store: Store, blobs: BlobStore) -> None:
    """Remove the files of removed versions, and set those of no version aside. Only while no daemon runs."""
    await asyncio.to_thread(blobs.remove_orphans, await store.retention.list_digests())


def _steps(store: Store, limits: PruneLimits, plan: PrunePlan) -> Iterator[Callable[[], Awaitable[object]]]:
    """Yield the transactions, each of a limited size."""
    for job_id, removable in plan.versions.items():
        for start in range(0, len(removable), BATCH):
            yield functools.partial(store.retention.mark_removed, job_id, removable[start : start + BATCH])
    for job_id, keys in plan.attempts.items():
        for start in range(0, len(keys), HISTORY_BATCH):
            part = keys[start : start + HISTORY_BATCH]
            yield functools.partial(store.retention.remove_history, part, metrics=job_id in plan.ended)
    for start in range(0, len(plan.clients), BATCH):
        assert limits.clients_before is not None
        yield functools.partial(
            store.clients.remove_clients, plan.clients[start : start + BATCH], limits.clients_before
        )


def _find_retained(job: JobState, limits: PruneLimits) -> RetainedVersions:
    retained = find_retained_versions(job)
    if limits.keep_versions is None or job.status not in ENDED_JOBS:
        return retained
    models_from = max(retained.models_from, job.latest.version + 1 - limits.keep_versions)
    return dataclasses.replace(retained, models_from=models_from)


def _history_before(job: JobState, limits: PruneLimits) -> float | None:
    days = job.spec.retention.history_days
    times = [limits.now_unix_s - days * 86400.0] if days else []
    if limits.history_before is not None and job.status in ENDED_JOBS:
        times.append(limits.history_before)
    return max(times, default=None)


def _digests(versions: Mapping[str, list[Removable]]) -> Iterator[str]:
    for removable in (removable for each in versions.values() for removable in each):
        version = removable.version
        model = (version.digest, version.delta_digest) if removable.model else ()
        state = (version.state_digest,) if removable.state else ()
        yield from (digest for digest in (*model, *state) if digest)
