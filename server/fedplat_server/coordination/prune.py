"""`fedplat-server prune`: removes old files, history and clients, by the jobs' policies and by limits.

`find` shows an operator what will be removed, `remove` removes it: rows first, then files. Beside a running daemon,
files are left to the daemon, because only it knows which ones it is writing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping

from fedplat.rounds import AttemptKey, JobState
from fedplat.rounds.states import ENDED_JOBS
from fedplat_server.coordination.retention import HISTORY_BATCH, find_retained_versions
from fedplat_server.database.jobs import Removable, RetainedVersions
from fedplat_server.database.ports import BATCH, Store
from fedplat_server.records import audit
from fedplat_server.storage.blobs import BlobStore

EVERYTHING = 1 << 31
Progress = Callable[[int, int], None]
"""Called with the number of steps that are done, and of all steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class PruneLimits:
    """What to remove besides the policies of the jobs; None: nothing.

    `history_before` and `clients_before` are times on the wall clock, `keep_versions` is for jobs that have ended.
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
        found = [one for each in self.versions.values() for one in each]
        return {
            "models": sum(one.model for one in found),
            "states": sum(one.state for one in found),
            "attempts": sum(map(len, self.attempts.values())),
            "clients": len(self.clients),
            "orphans": len(self.orphans),
            "bytes": self.size_bytes,
        }

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not any(self.counts.values())


async def find(store: Store, blobs: BlobStore, limits: PruneLimits, *, with_orphans: bool) -> PrunePlan:
    """Return what will be removed. A file without a reference may be one that a daemon has just written."""
    versions, attempts, ended = dict[str, list[Removable]](), dict[str, list[AttemptKey]](), set[str]()
    for record in await store.jobs.load_jobs():
        job = record.state
        if job.status in ENDED_JOBS:
            ended.add(job.job_id)
        if found := await store.retention.list_removable(job.job_id, _keep(job, limits), EVERYTHING):
            versions[job.job_id] = found
        before = _history_before(job, limits)
        if before is not None and (old := await store.retention.list_old_attempts(job.job_id, before, EVERYTHING)):
            attempts[job.job_id] = old
    clients = [] if limits.clients_before is None else await store.clients.list_idle_clients(limits.clients_before)
    there = await asyncio.to_thread(blobs.all_digests)
    orphans = there - await store.retention.list_referenced() if with_orphans else frozenset[str]()
    sizes = await asyncio.to_thread(_sizes, blobs, {*orphans, *_digests(versions)} & there)
    return PrunePlan(versions, attempts, frozenset(ended), clients, orphans, sum(sizes))


async def remove(store: Store, limits: PruneLimits, plan: PrunePlan, progress: Progress) -> None:
    """Carry out the plan in the database. `remove_files`, or a running daemon, removes the files."""
    steps = list(_steps(store, limits, plan))
    entry = audit.AuditEntry(audit.HOST, audit.AuditAction.PRUNED, "", plan.counts)
    await store.audit.append([entry])  # first: what is recorded and not done is done by the next call
    for done, step in enumerate(steps):
        progress(done, len(steps))
        await step()
    progress(len(steps), len(steps))


async def remove_files(store: Store, blobs: BlobStore) -> None:
    """Remove every file without a reference. Only while no daemon runs."""
    referenced = await store.retention.list_referenced()
    await asyncio.to_thread(blobs.remove_orphans, referenced)


def _steps(store: Store, limits: PruneLimits, plan: PrunePlan) -> Iterator[Callable[[], Awaitable[object]]]:
    """Yield the transactions, each of a bounded size."""
    for job_id, found in plan.versions.items():
        for start in range(0, len(found), BATCH):
            yield functools.partial(store.retention.mark_removed, job_id, found[start : start + BATCH])
    for job_id, keys in plan.attempts.items():
        for start in range(0, len(keys), HISTORY_BATCH):
            part = keys[start : start + HISTORY_BATCH]
            yield functools.partial(store.retention.remove_history, part, metrics=job_id in plan.ended)
    for start in range(0, len(plan.clients), BATCH):
        assert limits.clients_before is not None
        yield functools.partial(
            store.clients.remove_clients, plan.clients[start : start + BATCH], limits.clients_before
        )


def _keep(job: JobState, limits: PruneLimits) -> RetainedVersions:
    keep = find_retained_versions(job)
    if limits.keep_versions is None or job.status not in ENDED_JOBS:
        return keep
    models_from = max(keep.models_from, job.latest.version + 1 - limits.keep_versions)
    return dataclasses.replace(keep, models_from=models_from)


def _history_before(job: JobState, limits: PruneLimits) -> float | None:
    days = job.spec.retention.history_days
    moments = [limits.now_unix_s - days * 86400.0] if days else []
    if limits.history_before is not None and job.status in ENDED_JOBS:
        moments.append(limits.history_before)
    return max(moments, default=None)


def _digests(versions: Mapping[str, list[Removable]]) -> Iterator[str]:
    for one in (one for each in versions.values() for one in each):
        if one.model:
            yield from (one.version.digest, one.version.delta_digest)
        if one.state:
            yield one.version.state_digest


def _sizes(blobs: BlobStore, digests: Collection[str]) -> list[int]:
    return [blobs.size(digest) for digest in digests if blobs.exists(digest)]
