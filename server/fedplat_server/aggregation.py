"""Folds the updates of open attempts as they arrive (`attempts/` says where), and makes new versions durable.

One task per attempt takes its updates in the order in which they were accepted, so that equal orders give equal
bits: after a crash the same updates come again in the same order, out of the spool, and give the same version. So they
stay there until the version is stored; those of jobs in memory are freed as soon as they are folded, unless the job's
rule needs all of them at the end. A version's bytes are on the disk before anybody hears of it. Whatever goes wrong,
the coordinator hears how the attempt ended: an attempt that nobody ends would stop its job for ever.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from pathlib import Path

from msgspec import structs

from fedplat import codecs
from fedplat.errors import FedplatError
from fedplat.model import ModelFile
from fedplat.rounds import AttemptKey, JobState, ModelVersion
from fedplat.rounds.commands import Commit, Fold, Restart
from fedplat.rounds.events import AggregationFailed, AttemptAggregated
from fedplat.updates import Format
from fedplat_server import crash, logs
from fedplat_server.attempts.folding import Aggregate, Folding
from fedplat_server.attempts.here import Here
from fedplat_server.attempts.pooled import PoolFirst
from fedplat_server.attempts.recipe import Recipe, Update
from fedplat_server.blobs import Blob, BlobStore
from fedplat_server.errors import BlobError, StoreUnavailableError
from fedplat_server.pool.client import WorkerPool
from fedplat_server.training import ServerTraining, is_due
from fedplat_server.uploads import UploadKey, UploadStore

STORE_RETRY_S = 0.5
FindVersion = Callable[[str, int], Awaitable[ModelVersion | None]]
Post = Callable[[AttemptAggregated | AggregationFailed], None]


@dataclasses.dataclass(frozen=True)
class _Work:
    """An attempt that is being aggregated, and the task that does it."""

    queue: asyncio.Queue[Fold | Restart | Commit]
    task: asyncio.Task[None]


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """What the server has beside its own process."""

    pool: WorkerPool
    training: ServerTraining


class Aggregation:
    """All open attempts. `post` hears how each of them ended."""

    def __init__(
        self,
        blobs: BlobStore,
        uploads: UploadStore,
        find_version: FindVersion,
        post: Post,
        accelerators: Accelerators | None = None,
        on_leftovers: Callable[[Sequence[str]], None] = lambda digests: None,
    ) -> None:
        """Without `accelerators` this process aggregates for all jobs, and none may have server steps.

        `on_leftovers` is told of the files of attempts that came to nothing.
        """
        self._on_leftovers = on_leftovers
        self._accelerators = accelerators
        self._blobs = blobs
        self._uploads = uploads
        self._find_version = find_version
        self._post = post
        self._open: dict[AttemptKey, _Work] = {}
        self._made: dict[AttemptKey, list[str]] = {}
        self._kept: dict[str, set[AttemptKey]] = {}
        self._discarding: set[asyncio.Task[None]] = set()

    def take(self, job: JobState, command: Fold | Restart | Commit) -> None:
        """Queues an update to be folded, the sum to be begun anew, or the end of the attempt."""
        work = self._open.get(command.key)
        if work is None:
            queue: asyncio.Queue[Fold | Restart | Commit] = asyncio.Queue()
            task = asyncio.create_task(self._run(job, command.key, queue), name=f"aggregate {command.key}")
            work = self._open[command.key] = _Work(queue, task)
        if isinstance(command, Restart):
            while not work.queue.empty():  # it would be folded in vain
                work.queue.get_nowait()
        work.queue.put_nowait(command)

    def keep(self, attempts: Iterable[AttemptKey]) -> None:
        """Says what an earlier process received; what is not needed any more goes with the job's next attempt."""
        for key in attempts:
            self._kept.setdefault(key.job_id, set()).add(key)

    def end(self, key: AttemptKey, needed: Collection[AttemptKey] = ()) -> None:
        """Forgets an attempt that has ended, and what was received for it; but not for the attempts that are needed.

        Those are forgotten when a later attempt of their job ends.
        """
        work = self._open.pop(key, None)
        if work is not None:
            work.task.cancel()
        self._settle(self._made.pop(key, []))
        ended = {key} | self._kept.pop(key.job_id, set())
        if still := ended.intersection(needed):
            self._kept[key.job_id] = still
        for each in sorted(ended - still):
            self._in_background(self._uploads.discard_attempt, *each, name=f"discard {each}")

    def release(self, uploads: Sequence[UploadKey]) -> None:
        """Forgets updates of assignments that have ended, while others of their attempts go on."""
        if uploads:
            self._in_background(self._release, *uploads, name="release uploads")

    async def close(self) -> None:
        """Cancels all that is under way."""
        works, self._open = list(self._open.values()), {}
        for work in works:
            work.task.cancel()
        await asyncio.gather(*(work.task for work in works), *self._discarding, return_exceptions=True)

    async def _run(self, job: JobState, key: AttemptKey, queue: asyncio.Queue[Fold | Restart | Commit]) -> None:
        outcome: AttemptAggregated | AggregationFailed
        blobs = self._blobs.recorder()
        try:
            outcome = await self._aggregate(job, key, queue, blobs)
        except asyncio.CancelledError:
            self._settle(blobs.made)
            raise
        except (FedplatError, OSError, ValueError) as exc:
            logs.get().error("an attempt could not be aggregated", attempt=str(key), error=str(exc))
            outcome = AggregationFailed(key, str(exc))
        except Exception as exc:  # a task boundary: out of memory, or a bug; the round is tried again, and seen
            logs.get().exception("an attempt could not be aggregated", attempt=str(key))
            outcome = AggregationFailed(key, type(exc).__name__)
        self._open.pop(key, None)
        self._made[key] = blobs.made
        self._post(outcome)

    def _settle(self, made: Sequence[str]) -> None:
        """The fate of what an attempt has made is stored: a version names it, or none ever will."""
        if made:
            self._blobs.settle(made)
            self._on_leftovers(made)

    async def _aggregate(
        self, job: JobState, key: AttemptKey, queue: asyncio.Queue[Fold | Restart | Commit], blobs: BlobStore
    ) -> AttemptAggregated:
        recipe = Recipe.of(job, blobs)
        from_latest = recipe.rule().from_latest
        folding, paths = self._begun(job, recipe, blobs), list[Path]()
        try:
            while not isinstance(command := await queue.get(), Commit):
                if isinstance(command, Restart):
                    await folding.close()
                    folding, paths = self._begun(job, recipe, blobs), []
                    continue
                origin = await self._origin(job, command) if from_latest else ""
                paths.append(await asyncio.to_thread(self._received, command))
                await folding.fold(Update(str(paths[-1]), command.contribution, origin))
                if job.spec.durability == "memory" and not folding.keeps_updates:
                    await asyncio.to_thread(self._release, UploadKey(*command.origin, command.client_id))
            aggregate, version = await self._committed(job, key, folding, paths)
        finally:
            await folding.close()
        if aggregate.model.digest != version.digest:
            blobs.made.append(version.digest)  # the server's own training has stored it
        if codec := job.spec.compression.downlink:
            delta = await asyncio.to_thread(self._keep_delta, blobs, codec, aggregate)
            version = structs.replace(
                version, delta_digest=delta.digest, delta_size_bytes=delta.size_bytes, delta_base=job.latest.digest
            )
        return AttemptAggregated(key, version, aggregate.published)

    async def _committed(
        self, job: JobState, key: AttemptKey, folding: Folding, updates: Sequence[Path]
    ) -> tuple[Aggregate, ModelVersion]:
        """What came of the updates, and the version that it is; or becomes, if the server trains it further."""
        if not is_due(job, key.round):
            aggregate = await folding.commit()
            return aggregate, _version(job, key, aggregate)
        assert self._accelerators is not None
        with self._blobs.temporary() as draft:
            aggregate = await folding.commit(draft)
            version = _version(job, key, aggregate)
            return aggregate, await self._accelerators.training.step(job, version, draft, updates)

    def _begun(self, job: JobState, recipe: Recipe, blobs: BlobStore) -> Folding:
        """Where the job's attempts are aggregated."""
        if job.spec.pool is None or self._accelerators is None:
            return Here(recipe, blobs)
        return PoolFirst(recipe, blobs, self._accelerators.pool.with_backend(job.spec.pool.backend))

    async def _origin(self, job: JobState, command: Fold) -> str:
        """The file of the version that a client began with, if that is not the latest."""
        if command.base_version == job.latest.version:
            return ""
        while True:
            try:
                found = await self._find_version(job.job_id, command.base_version)
            except StoreUnavailableError:  # the runner logs it; an outage costs no attempt
                await asyncio.sleep(STORE_RETRY_S)
            else:
                assert found is not None
                return os.path.abspath(self._blobs.path(found.digest))

    def _received(self, command: Fold) -> Path:
        """The file of an update."""
        path = self._uploads.complete(UploadKey(*command.origin, command.client_id), command.digest)
        if path is None:
            raise BlobError(f"the update of {command.client_id} is gone or damaged")
        return path.absolute()

    def _keep_delta(self, blobs: BlobStore, codec: codecs.Options, aggregate: Aggregate) -> Blob:
        """Stores the step to a version as a file of its own; without a version that names it, it is an orphan."""
        model = ModelFile.open(blobs.path(aggregate.model.digest))
        with crash.step("commit.delta"):
            return blobs.put_chunks(Format(codec, model.schema).framed([aggregate.payload], model))

    def _release(self, *uploads: UploadKey) -> None:
        for key in uploads:
            self._uploads.discard(key)

    def _in_background(self, discard: Callable[..., None], *arguments: object, name: str) -> None:
        async def work() -> None:
            try:
                # In a thread: unlinking gigabytes must not hold up the event loop.
                await asyncio.to_thread(discard, *arguments)
            except BlobError as exc:  # no harm to the round; the next start clears the folder
                logs.get().error("updates could not be thrown away", what=name, error=str(exc))

        task = asyncio.create_task(work(), name=name)
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)


def _version(job: JobState, key: AttemptKey, aggregate: Aggregate) -> ModelVersion:
    return ModelVersion(
        version=job.latest.version + 1,
        round=key.round,
        attempt=key.number,
        digest=aggregate.model.digest,
        size_bytes=aggregate.model.size_bytes,
        state_digest=aggregate.state.digest if aggregate.state else "",
        num_updates=aggregate.num_updates,
        total_weight=aggregate.total_weight,
    )
