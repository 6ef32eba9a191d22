"""`fedplat-server prune`: remove old files, history and clients, according to the jobs' policies and to limits.

`find` returns what will be removed, `remove` removes it: rows first, then files. If a daemon is running, the daemon
removes the files, because other processes cannot detect files that it is writing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping

from fedplat.rounds import AttemptKey, JobState
from fedplat.rounds.states import ENDED_JOBS
from fedplat_server.coordination.retention import HISTORY_BATCH, find_retained_versions
from fedplat_server.database.jobs import Removable, RetainedVersions
from fedplat_server.database.sql_retention import BATCH
from fedplat_server.database.store import Store
from fedplat_server.records import audit
from fedplat_server.storage.blobs import BlobStore

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


async def find(store: Store, blobs: BlobStore, limits: PruneLimits, *, with_orphans: bool) -> PrunePlan:
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


async def remove(store: Store, limits: PruneLimits, plan: PrunePlan, progress: Progress) -> None:
    """Execute the plan in the database. `remove_files`, or a running daemon, removes the files."""
    steps = list(_steps(store, limits, plan))
    entry = audit.AuditEntry(audit.HOST, audit.AuditAction.PRUNED, "", plan.counts)
    await store.audit.append([entry])  # first: if this process dies, the next call removes what was recorded
    for done, step in enumerate(steps):
        progress(done, len(steps))
        await step()
    progress(len(steps), len(steps))


async def remove_files(store: Store, blobs: BlobStore) -> None:
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
        if removable.model:
            yield from (removable.version.digest, removable.version.delta_digest)
        if removable.state:
            yield removable.version.state_digest
